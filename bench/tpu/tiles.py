"""Cycles of a decoding step with its rows in tiles and as they are, on a v6e that need not exist.

    python -m bench.tpu.tiles

prints a line for each number of slots; exit status 1 if a limit is broken. The model has the sizes
of SmolLM2-135M in bfloat16, tiles have 128 rows, and rows see 256 entries. Cycles are those that
the compiler says of each operation, times the turns of the loops around it: the arithmetic, without
waits for memory. It needs libtpu (the `aot-tpu` extra), and some ten minutes.
"""

import os
import re
import sys
import tempfile
from typing import Any

from bench.tpu.loops import BOUND, LOOP, by_name
from bench.tpu.programs import ENVIRONMENT, TOPOLOGIES

SEEN = 256
LIMITS = {(8, 1): 1.1, (32, 4): 1.1}  # slots and rows of each: times the cycles
CYCLES = re.compile(r'"bundle_analysis_data":\{[^}]*"estimated_cycles":"?(\d+)')


def main() -> int:
    """Compile the steps; the exit status."""
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"--xla_jf_dump_static_llo_profile_to={folder}"
        os.environ.update(ENVIRONMENT, LIBTPU_INIT_ARGS=arguments)
        for (slots, rows), most in LIMITS.items():
            plain, tiled = (step_cycles(slots, rows, tile) for tile in (None, 128))
            broken += tiled > most * plain
            text = f"{tiled:,} cycles in tiles, {plain:,} without: {tiled / plain:.2f}x, of {most}x"
            print(f"{slots} slots of {rows} rows: {text}", flush=True)
    return int(broken > 0)


def step_cycles(slots: int, rows: int, tile: int | None) -> int:
    """Cycles of a forward pass and its logits."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_specdec.checkpoint.model_config import ModelConfig
    from jax_specdec.device.model import init_cache, init_params, llama
    from jax_specdec.device.model.tiles import KEY_TILE

    model = ModelConfig(
        vocab_size=49_152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, intermediate_size=1536, dtype="bfloat16", row_tile=tile,
    )  # fmt: skip
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES["v6e"])
    mesh = jax.sharding.Mesh(topology.devices[:1], ("x",))
    place = NamedSharding(mesh, PartitionSpec())

    def given() -> tuple[Any, ...]:
        ids = jnp.zeros((slots, rows), jnp.int32)
        return init_params(model, jax.random.key(0)), ids, ids, init_cache(model, slots, 2 * SEEN)

    def step(params: Any, tokens: jax.Array, positions: jax.Array, cache: Any) -> Any:
        hidden, new = llama.forward(params, model, tokens, positions, cache)
        return llama.logits(params, model, hidden), new

    array: Any = jax.ShapeDtypeStruct
    shapes = jax.tree.map(lambda x: array(x.shape, x.dtype, sharding=place), jax.eval_shape(given))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(step, donate_argnums=3).trace(*shapes)
        text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    return cycles(text, SEEN // KEY_TILE)


def cycles(text: str, turns: int) -> int:
    """Cycles of a compiled program; `turns` of loops whose number is no constant."""
    found = by_name(text)
    entry = re.search(r"^ENTRY %([\w.\-]+)", text, re.MULTILINE)
    assert entry is not None

    def of(name: str) -> int:
        total = 0
        for line in found[name]:
            if loop := LOOP.search(line):
                bounds = [int(n) for x in found[loop[1]] for n in BOUND.findall(x)]
                total += max(bounds, default=turns) * of(loop[2])
            elif said := CYCLES.search(line):
                total += int(said[1])
        return total

    return of(entry[1])


if __name__ == "__main__":
    sys.exit(main())
