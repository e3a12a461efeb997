"""The kernels at other schedules than `choose_schedule`'s: which split, step and group is fastest?

    python -m bench.gpu_tune --rows 64 1536 --k 20 --dtype bfloat16     on a GPU

Three numbers can change without another kernel: how many programs share a row (`splits`), how many
blocks a program has in flight (`blocks_per_step`), and the width of groups, which trades pass 1's
reductions for pass 2's reads. The first row of a table is the current choice, and ratios are to it.
The results of all schedules are compared before anything is timed.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.comparison import Comparison, from_samples
from bench.files import write_json
from bench.timing import print_table
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule, choose_schedule
from pallas_kernels.contract.types import Outputs, Rows
from pallas_kernels.lowering import implementation
from pallas_kernels.testing import times
from pallas_kernels.testing.shapes import Shape

CURRENT = "current: "
MULTIPROCESSORS = 132
PROGRAMS_EACH = (1, 2, 3, 4, 6, 8)  # on a multiprocessor, at once or one after the other
BLOCKS = (1, 2, 4)
WIDTHS = (128, 256)


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rows", type=int, nargs="+", default=(64, 1536), metavar="R")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=(131_072,), metavar="V")
    parser.add_argument("--k", type=int, nargs="+", default=(20,), metavar="K")
    parser.add_argument("--dtype", nargs="+", default=("bfloat16",))
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args(arguments)
    probe = jax.ShapeDtypeStruct((1, 4096), jnp.float32)  # type: ignore[no-untyped-call]
    obstacle = implementation.gpu_obstacle(probe)
    if obstacle is not None:
        print(f"NOT RUN: {obstacle}. Nothing was measured.")
        return 2
    shapes = itertools.starmap(
        Shape, itertools.product(options.rows, options.vocabulary, options.k, options.dtype)
    )
    found = []
    for shape in shapes:
        found.append(measure(shape))
        print_table(found[-1:])
        if options.json is not None:
            write_json(options.json, found)
    return 0


def schedules(shape: Shape) -> Iterator[Schedule]:
    """The schedules to try, each once; the current choice is the first."""
    current = choose_schedule(shape.rows, shape.vocabulary, shape.k, shape.dtype)
    splits = {max(1, MULTIPROCESSORS * each // shape.rows) for each in PROGRAMS_EACH}
    if shape.rows > MULTIPROCESSORS:  # the rows fill the chip; split, its last programs end sooner
        splits |= {2, 4}
    found = {current: None}
    for width, blocks, wanted in itertools.product(WIDTHS, BLOCKS, sorted(splits)):
        whole = Schedule(shape.vocabulary, shape.dtype, width, blocks, 1)
        if whole.num_steps:
            found[replace(whole, splits=min(wanted, whole.num_steps))] = None
    yield from found


def name_of(schedule: Schedule) -> str:
    """The three numbers of a schedule, in words."""
    return (
        f"groups of {schedule.group_width}, {schedule.blocks_per_step} blocks a step, "
        f"{schedule.splits} splits"
    )


def measure(shape: Shape, at_most: int | None = None) -> Comparison:
    """Check every schedule on the same arrays, then time it; `at_most` limits their number."""
    buffers, token_ids = times.buffers_of(shape, times.MOST_BUFFERS)
    samples, expected = {}, None
    for i, schedule in enumerate(list(schedules(shape))[:at_most]):

        def call(x: jax.Array, ids: jax.Array, schedule: Schedule = schedule) -> Any:
            return run.topk_logprobs(Rows(x, ids), Outputs(shape.k), schedule)

        name = f"{'' if i else CURRENT}{name_of(schedule)}"
        found, seconds = times.timed(call, buffers, token_ids)
        expected = found if expected is None else expected
        times.check(name, expected, found)
        samples[name] = seconds
    current, *others = samples
    order = [current, *sorted(others, key=lambda name: float(np.median(samples[name])))]
    comparison = from_samples(
        f"schedules for R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}",
        {name: samples[name] for name in order},
        settings={"shape": str(shape), "device": jax.devices()[0].device_kind},
    )
    figures = {name: {"GB/s": buffers[0].nbytes / comparison[name].median / 1e9} for name in order}
    return replace(comparison, suite="gpu tune", figures=figures)


if __name__ == "__main__":
    sys.exit(main())
