"""Reads of sampled rows, compiled for `bench.aot`: pass 1 with group sums, pass 2 for candidates.

The calls take the schedule and the kernels that `mosaic_gpu.groups` takes, for
one of its numbers of candidates; which one is needed is known when the program runs.
"""

from typing import Any

import jax
from jax.stages import Lowered

from bench.gpu import sass
from pallas_kernels.backends.mosaic_gpu import groups, groups_kernel
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule, choose_fixed_schedule
from pallas_kernels.testing import compile_target
from pallas_kernels.testing.shapes import Shape

# Sums at the rows' temperatures; beside them, for raw logprobs, sums at temperature 1.
PATHS = ("sampled", "sampled, raw")
SHAPES = (
    Shape(1536, 131_072, 20, "bfloat16"),
    Shape(64, 151_936, 128, "bfloat16"),
    Shape(64, 131_072, 20, "float32"),
    Shape(64, 50_257, 20, "bfloat16"),
)


def schedule_of(shape: Shape) -> Schedule:
    """The cut of the rows."""
    return choose_fixed_schedule(shape.rows, shape.vocabulary, shape.dtype)


def lowered(path: str, shape: Shape, device: compile_target.CompileTarget) -> Lowered:
    """Both passes at one shape, before they are compiled."""
    schedule, raw = schedule_of(shape), path == PATHS[1]
    number = -(-shape.vocabulary // schedule.group_width)

    def call(logits: jax.Array, inverse: jax.Array) -> Any:
        (out,) = groups_kernel.read_groups(schedule, logits, inverse, raw)
        top = groups.top_of_groups(logits, schedule, out, shape.k)
        return groups.of_rows(out, schedule, number), top

    logits = device.array((shape.rows, shape.vocabulary), shape.dtype)
    return jax.jit(call).lower(logits, device.array((shape.rows,), "float32"))


def loops_per_logit(kernel: sass.Kernel, schedule: Schedule) -> list[float]:
    """Instructions a logit of pass 1's loops, ascending: with one exponential, with two."""
    each = schedule.block * schedule.blocks_per_step / 128
    loops = [kernel.code.names(loop) for loop in kernel.code.loops]
    return sorted(len(names) / each for names in loops if "MUFU.EX2" in names)


def bytes_of_sums(path: str, schedule: Schedule) -> int:
    """What pass 1 writes of a row beside the maxima."""
    return 4 * schedule.num_groups * (1 + PATHS.index(path))
