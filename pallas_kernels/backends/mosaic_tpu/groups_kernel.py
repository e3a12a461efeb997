"""Groups of rows that are sampled, on a TPU: the maximum and the sum of exponentials of each.

`group_sweep.py` says what these are; here are the grid, the copies and the call.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_tpu.group_sweep import Groups, Sweep, memory
from pallas_kernels.backends.mosaic_tpu.rows_kernel import like
from pallas_kernels.backends.mosaic_tpu.schedule import LANES, Schedule
from pallas_kernels.backends.mosaic_tpu.unit import Copies, Interpret, Unit


def body(schedule: Schedule, groups: Groups, *refs: jax.Ref) -> None:
    """One grid step: a unit of rows, or a block of it."""
    offset_ref, logits_ref, constants_ref, *rest = refs
    semaphores = None if schedule.as_blocks else rest.pop()
    *outputs, buffer, of_first, of_second = rest
    number = pl.program_id(0)
    copies = Copies(schedule, logits_ref, None, buffer, semaphores)
    unit = Unit(schedule, copies, number, 0, buffer, constants_ref, None)
    sweep = Sweep(unit, groups, outputs, (of_first, of_second), offset=offset_ref[0])
    if schedule.as_blocks:
        place, size = pl.program_id(1), schedule.block * LANES
        buffer[0, :, pl.ds(pl.multiple_of(place * size, size), size)] = logits_ref[...]
        is_last = place == schedule.width // size - 1
        pl.when(is_last)(sweep.store)
        return
    pl.when(number == 0)(lambda: copies.start(0))
    pl.when(number + 1 < schedule.num_units)(lambda: copies.start(number + 1))
    sweep.store()


def call(
    schedule: Schedule,
    groups: Groups,
    interpret: Interpret,
    offset: jax.Array,
    logits: jax.Array,
    constants: jax.Array,
) -> list[jax.Array]:
    """Run the kernel.

    Args:
      schedule: of these logits.
      groups: what is read of them.
      interpret: `pltpu.InterpretParams`, or False.
      offset: [1] int32, the column of the first group.
      logits: [R, V] bfloat16 or float32; of a schedule for float16, these as float32.
      constants: [rows, 3] int32, `unit.RowConstants` of each row of whole units; no limits.

    Returns:
      Maxima, sums, and sums at temperature 1 where they are wanted: [rows, width] float32, rows in
      the order of `run.in_units`.
    """
    rows = schedule.num_units * schedule.unit
    buffers = 2
    grid: tuple[int, ...] = (schedule.num_units,)
    of_logits = pl.BlockSpec(memory_space=pltpu.HBM)
    semaphores = [pltpu.SemaphoreType.DMA((2, schedule.num_chunks))]
    if schedule.as_blocks:
        size = schedule.block * LANES
        grid, buffers, semaphores = (schedule.num_units, schedule.width // size), 1, []
        of_logits = pl.BlockSpec((schedule.unit, size), lambda i, j, *_: (i, j))
    of_groups = pl.BlockSpec((schedule.unit, groups.width), lambda i, *_: (i, 0))
    run = pl.pallas_call(
        functools.partial(body, schedule, groups),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                of_logits,
                pl.BlockSpec((schedule.unit, constants.shape[1]), lambda i, *_: (i, 0)),
            ],
            out_specs=[of_groups] * groups.outputs,
            scratch_shapes=[
                pltpu.VMEM(
                    (buffers, *schedule.buffer), jnp.int32 if schedule.as_words else logits.dtype
                ),
                *memory(schedule),
                *semaphores,
            ],
        ),
        out_shape=[like(constants, (rows, groups.width), jnp.float32)] * groups.outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple("arbitrary" for _ in grid),
            allow_input_fusion=(False, schedule.as_blocks, False),  # as in `rows_kernel.call`
            disable_bounds_checks=True,
            vmem_limit_bytes=schedule.vmem_bytes,
        ),
        interpret=interpret,
        name="read_groups",
    )
    if not (schedule.interpreted or schedule.as_blocks):
        logits = pltpu.with_memory_space_constraint(logits, pltpu.HBM)
    results: list[jax.Array] = run(offset, logits, constants)
    return results
