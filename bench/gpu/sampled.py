"""Reads of sampled rows, compiled for `bench.aot`: pass 1 with group sums, pass 2 for candidates.

The calls take the schedule and the kernels that `mosaic_gpu.groups` takes, for
one of its numbers of candidates; which one is needed is known when the program runs.
"""

from typing import Any

import jax
from jax.stages import Lowered

from bench.gpu import sass, trips
from pallas_kernels.backends.mosaic_gpu import groups, groups_kernel
from pallas_kernels.backends.mosaic_gpu.changes.row_changes import flat_changes
from pallas_kernels.backends.mosaic_gpu.schedule import (
    GROUP,
    Schedule,
    choose_read_schedule,
)
from pallas_kernels.contract.changes import Changes, prepared
from pallas_kernels.testing import compile_target
from pallas_kernels.testing.shapes import Shape

# Sums at the rows' temperatures; beside them, for raw logprobs, sums at temperature 1; both, and of
# logits that a mask changes, or a mask and biases, sums at the rows' temperatures.
PATHS = ("sampled", "sampled, raw", "sampled, mask, raw", "sampled, bias, raw")
SHAPES = (
    Shape(1536, 131_072, 20, "bfloat16"),
    Shape(64, 151_936, 128, "bfloat16"),
    Shape(64, 131_072, 20, "float32"),
    Shape(64, 50_257, 20, "bfloat16"),
)


def schedule_of(shape: Shape) -> Schedule:
    """The cut of the rows."""
    return choose_read_schedule(shape.rows, shape.vocabulary, shape.dtype)


def lowered(path: str, shape: Shape, device: compile_target.CompileTarget) -> Lowered:
    """Both passes at one shape, before they are compiled."""
    schedule, raw = schedule_of(shape), path != PATHS[0]
    number = -(-shape.vocabulary // GROUP)

    def call(logits: jax.Array, inverse: jax.Array, given: Changes | None) -> Any:
        changes = prepared(given, shape.vocabulary)
        words = flat_changes(changes, shape.vocabulary)
        every = groups_kernel.read_groups(schedule, logits, inverse, raw, changes=words)
        top = groups.top_of_groups(logits, schedule, every[0], shape.k, changes, words)
        return [groups.groups_of_rows(out, schedule, number) for out in every], top

    rows, kinds = shape.rows, ("int32", "float32") if path == PATHS[3] else ()
    words = device.array((rows, -(-shape.vocabulary // 32)), "int32")
    biases = (device.array((rows, trips.BIASES), dtype) for dtype in kinds)
    changes = Changes(words, *biases) if path in PATHS[2:] else None
    logits = device.array((rows, shape.vocabulary), shape.dtype)
    return jax.jit(call).lower(logits, device.array((rows,), "float32"), changes)


def loops_per_logit(kernel: sass.Kernel, schedule: Schedule) -> list[float]:
    """Instructions a logit of pass 1's loops, ascending: with one exponential, with two."""
    each = schedule.block / 128
    loops = [kernel.code.names(loop) for loop in kernel.code.loops]
    return sorted(len(names) / each for names in loops if "MUFU.EX2" in names)


def bytes_besides(path: str, schedule: Schedule) -> int:
    """What pass 1 reads and writes of a row beside the logits, one set of maxima and of sums."""
    number, size = schedule.num_groups, 16 // schedule.vector
    if path in PATHS[:2]:
        return 4 * number * PATHS.index(path)
    of_groups = 8 + size  # two more sums, and the maxima of another set
    masks = 1
    if path == PATHS[3]:
        of_groups, masks = of_groups + (4 if size == 2 else 0), 2
    return number * of_groups + masks * schedule.vocabulary // 8
