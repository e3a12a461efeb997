"""How many draws of the kernels differ from XLA's: `python -m ...ptx.many_draws [--draws N]`.

The kernels' PTX reads the rows and draws, executed on a CPU; XLA does both on the same CPU. All
have the same noise, so only the rounding of sums and logarithms can tell them apart. By the largest
errors that the PTX ISA allows (`--errors random`), it differs most.
"""

import argparse
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.groups import RowsToDraw
from pallas_kernels.backends.mosaic_gpu import draw, groups_kernel
from pallas_kernels.backends.mosaic_gpu import groups as sampled
from pallas_kernels.numbers.random_draws import GROUP, RECOVER, Source
from pallas_kernels.sampling import row_draws
from pallas_kernels.sampling.parameters import Sampling, Truncation
from pallas_kernels.sampling.row_draws import Drawing
from pallas_kernels.sampling.row_read import read
from pallas_kernels.sampling.rows import GroupedRows
from tests.pallas_kernels.mosaic_gpu.ptx import kernels
from tests.pallas_kernels.mosaic_gpu.ptx.run_kernels import hardware, together
from tests.pallas_kernels.mosaic_gpu.ptx.sampled_cases import fixed

VOCABULARY, ROWS, SLOTS = 8448, 8, 2048  # slots of one launch


def main() -> None:
    """Print the number of draws and of those that differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--errors", choices=("none", "up", "random"), default="none")
    options = parser.parse_args()
    compiler = kernels.Compiler()
    rng = np.random.default_rng(options.first)
    x = jnp.asarray((rng.normal(size=(ROWS, VOCABULARY)) * 2).astype(np.float32))
    stand = kernels.Stand(conditions(options.errors), compiler)
    ones = jnp.ones(ROWS, jnp.float32)
    with kernels.executed(stand, (groups_kernel,)):
        schedule = fixed(VOCABULARY, "float32")
        (out,) = groups_kernel.read_groups(schedule, x, ones, False)
    groups, _ = sampled.of_rows(out, schedule, VOCABULARY // 256)
    begin, done, differ = time.monotonic(), 0, 0
    while done < options.draws:
        seeds = jnp.arange(SLOTS, dtype=jnp.uint32) + np.uint32(options.first + done)
        taken = jnp.asarray(rng.integers(-VOCABULARY, VOCABULARY, (SLOTS, 1)), jnp.int32)
        taken = jnp.maximum(taken, -1)  # half of the slots have none
        with kernels.executed(stand, (draw,)):
            given = slots(x, groups, seeds, taken)
            found = draw.draw(x, given, (GROUP, RECOVER)).token_ids
        differ += int((np.asarray(found) != np.asarray(by_xla(x, seeds, taken))).sum())
        done += SLOTS
        took = time.monotonic() - begin
        print(f"{done} draws, {differ} differ, {took:.0f} s", flush=True)


def conditions(errors: Literal["none", "up", "random"]) -> kernels.Conditions:
    return kernels.Conditions(errors, together, hardware=hardware(0, 0xFF, errors))


def slots(x: jax.Array, groups: Any, seeds: jax.Array, taken: jax.Array) -> RowsToDraw:
    """A slot for each seed, on the rows in turn."""
    none = jnp.full(SLOTS, -jnp.inf, jnp.float32)
    return RowsToDraw(
        rows=jnp.arange(SLOTS, dtype=jnp.int32) % ROWS,
        cut_logit=none,
        cut_id=jnp.full(SLOTS, VOCABULARY - 1, jnp.int32),
        excluded_ids=taken,
        seed=seeds,
        position=jnp.ones(SLOTS, jnp.int32),
        maxima=groups.maxima,
        sums=groups.sums,
        largest=x.max(axis=1),
        inverse=jnp.ones(ROWS, jnp.float32),
    )


@jax.jit
def by_xla(x: jax.Array, seeds: jax.Array, taken: jax.Array) -> jax.Array:
    """The same draws."""
    rows, every = GroupedRows.of(x), jnp.arange(SLOTS, dtype=jnp.int32) % ROWS
    sampling = Sampling.greedy(ROWS)._replace(temperature=jnp.ones(ROWS, jnp.float32))
    found = read(rows, sampling)
    drawing = Drawing(
        rows=every,
        cut=Truncation.nothing((SLOTS,), VOCABULARY),
        largest=found.largest[every],
        inverse=found.inverse[every],
        log_total=found.log_total[every],
        sampled=jnp.ones(SLOTS, bool),
        few=jnp.zeros(SLOTS, bool),
        excluded_ids=taken,
        log_p=jnp.full(taken.shape, -jnp.inf, jnp.float32),
        q=jnp.zeros(taken.shape, jnp.float32),
        source=Source(seeds, jnp.ones(SLOTS, jnp.int32)),
    )
    return row_draws.draw(rows, found, drawing)


if __name__ == "__main__":
    main()
