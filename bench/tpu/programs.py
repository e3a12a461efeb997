"""One program compiled for a TPU that need not exist, and its cycles; as a process of its own.

    python -m bench.tpu.programs CHIP WAY ROWS VOCABULARY K DTYPE

prints a line of JSON. libtpu reads where to write its listings when it is loaded, so each program
has a process. WAY is `plain` (log_softmax, top_k, gather and a count), `xla` (ours without the
kernel), `kernel`, `groups` (the read of rows that are sampled), `linear` (of hidden states, and a
head in bfloat16), or `full`: the kernel with what rare rows need, whose loops would be counted as
if every row took them.
"""

import functools
import json
import os
import re
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "7x": "tpu7x:2x2x1"}
# libtpu asks no metadata server, and takes no lock that one process alone can have.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
WAYS = ("kernel", "groups", "linear", "plain", "xla", "full")
HIDDEN = 4096
# GHz, and GB/s of a core's HBM, from Google's pages on each chip and jax's `TpuInfo`.
CLOCKS = {"v5e": 1.5, "v6e": 1.75, "v5p": 1.75, "7x": 1.9}
BANDWIDTHS = {"v5e": 819, "v6e": 1640, "v5p": 2765, "7x": 3690}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program."""

    chip: str
    way: str
    rows: int
    vocabulary: int
    k: int
    dtype: str
    cycles: int  # without waits for copies
    seconds: float  # of processor time, to compile: other processes take none of it
    gigabytes: float  # the process, at most
    temporaries: int  # bytes
    reads: int  # operations that read the logits


def main() -> None:
    """Compile one program and print what it takes."""
    chip, way, *numbers, dtype = sys.argv[1:]
    rows, vocabulary, k = map(int, numbers)
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"--xla_jf_dump_to={folder} --xla_jf_dump_to_filter=final_bundles"
        os.environ.update(ENVIRONMENT, LIBTPU_INIT_ARGS=arguments)
        from pallas_kernels.testing.as_proved import as_proved

        with as_proved():  # a linear call names no implementation
            compiled = measure(chip, way, rows, vocabulary, k, dtype, Path(folder))
        print(json.dumps(asdict(compiled)))


def measure(
    chip: str, way: str, rows: int, vocabulary: int, k: int, dtype: str, folder: Path
) -> Compiled:
    """Compile a program with its listings in a folder."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from bench.tpu import bundles
    from pallas_kernels import linear_topk_logprobs, topk_logprobs, use_implementation
    from pallas_kernels.backends import read
    from pallas_kernels.backends.groups import Needed
    from pallas_kernels.backends.mosaic_tpu import rows as run
    from pallas_kernels.backends.mosaic_tpu import schedule
    from pallas_kernels.sampling.rows import GroupedRows
    from pallas_kernels.testing import plain as reference

    def chosen(*arguments: Any, **options: Any) -> schedule.Schedule:
        return replace(schedule.choose_schedule(*arguments, **options), rare=way == "full")

    def program(x: Any, ids: Any) -> Any:
        if way == "groups":  # without candidates
            part = GroupedRows.of(x).part
            inverse = 1 / (1 + ids.astype(jnp.float32))
            nothing = Needed.all_of(jnp.zeros_like(ids))
            with use_implementation("mosaic_tpu"):
                return read.read_groups(part, inverse, nothing, -1)[0].groups
        if way == "linear":
            return linear_topk_logprobs(x[0], x[1], ids, k, logits_dtype=dtype)
        if way == "plain":
            return reference.topk_logprobs(x, ids, k)
        return topk_logprobs(x, ids, k, implementation="xla" if way == "xla" else "mosaic_tpu")

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    mesh = jax.sharding.Mesh(topology.devices[:1], ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    given: Any = array((rows, vocabulary), jnp.dtype(dtype)), array((rows,), jnp.dtype("int32"))
    if way == "linear":
        given = [array((n, HIDDEN), jnp.dtype("bfloat16")) for n in (rows, vocabulary)], given[1]
    begin = time.process_time()
    with (
        mock.patch.object(run, "choose_schedule", chosen),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        made = jax.jit(program).trace(*given).lower(lowering_platforms=("tpu",)).compile()
    seconds = time.process_time() - begin
    text = made.as_text()
    the = schedule.choose_schedule(
        (rows, vocabulary), rows, k, dtype, gathered=False, entropy=False
    )
    cycles = 0
    for name, listing in bundles.listings(folder).items():
        loops = bundles.read(listing)
        if way in ("plain", "xla"):
            cycles += bundles.plain_cycles(loops, listing, k)
        elif name.startswith("topk_logprobs"):
            size = the.num_units, the.num_batches
            if the.as_blocks:
                cycles += bundles.block_cycles(loops, *size, k, the.width // the.block // 128)
            else:
                cycles += bundles.kernel_cycles(loops, *size)
        else:
            cycles += loops.cycles(1)
    memory = made.memory_analysis()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Compiled(
        chip, way, rows, vocabulary, k, dtype, cycles, round(seconds, 1), round(peak, 2),
        memory.temp_size_in_bytes, reads(text, rows, vocabulary),
    )  # fmt: skip


def reads(text: str, rows: int, vocabulary: int) -> int:
    """Operations of the entry computation with an operand of the logits' shape."""
    entry = text[text.index("\nENTRY") :].split("\n}")[0]
    lines = [line.partition(" = ") for line in entry.splitlines() if " = " in line]
    # No tuple: an asynchronous gather's halves hand one on that begins with the logits.
    logits = {
        name.replace("ROOT", "").strip()
        for name, _, rest in lines
        if re.match(rf"\w+\[{rows},{vocabulary}\]", rest)
    }
    return sum(
        any(name in logits for name in re.findall(r"%[\w.\-]+", rest)) for _, _, rest in lines
    )


if __name__ == "__main__":
    main()
