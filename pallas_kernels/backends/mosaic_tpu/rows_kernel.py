"""The TPU kernel: rows come from HBM to VMEM once, and everything else happens there.

A grid step serves a batch of target rows, unit by unit. While a unit is worked on, the copies of
the next one run. One sweep over its logits in VMEM makes statistics and lane maxima, another one
finds candidates for the top K (`sweeps`): whatever reaches the K-th largest of the row's lane
maxima (`threshold`) is pushed on the stack of its lane (`stacks`). When all units of the batch are
done, the K largest are taken from the stacks of all their rows at once (`order`).

Rare rows take another sweep: those whose stacks overflow, or whose order is that of subnormal
numbers (`scan`), and those whose maximum is far from the first guess.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_tpu.bits import turn
from pallas_kernels.backends.mosaic_tpu.copies import Copies
from pallas_kernels.backends.mosaic_tpu.order import order
from pallas_kernels.backends.mosaic_tpu.plan import LANES, SUBLANES, Plan
from pallas_kernels.backends.mosaic_tpu.scan import scan
from pallas_kernels.backends.mosaic_tpu.stacks import Stacks
from pallas_kernels.backends.mosaic_tpu.sweeps import (
    MOST,
    Found,
    candidates,
    count_again,
    first_sweep,
    groups,
    sums_again,
)
from pallas_kernels.backends.mosaic_tpu.threshold import threshold
from pallas_kernels.backends.mosaic_tpu.unit import SHAPE, Unit

SMALLEST = 1.1754943508222875e-38  # float32's smallest normal number


def body(plan: Plan, *refs: Any) -> None:
    """One grid step."""
    count_ref, rows_ref, logits_ref, given_ref, *rest = refs
    allowed_ref = rest.pop(0) if plan.masked else None
    semaphores = None if plan.as_blocks else rest.pop()
    turned_ref = rest.pop() if plan.masked else None
    stats_ref, values_ref, ids_ref, buffer, maxima, *of_selection = rest
    batch = pl.program_id(0)
    units = lax.div(count_ref[0] + (plan.unit - 1), plan.unit)
    first = batch * plan.batch_units
    copies = Copies(plan, logits_ref, rows_ref, buffer, semaphores)
    stacks = Stacks(plan, *(of_selection[:2] if plan.k else (None, None)))

    def serve(index: jax.Array) -> None:
        number = first + index
        unit = Unit(plan, copies, number, index, buffer, given_ref, turned_ref)
        if plan.masked:
            turn(plan, allowed_ref, [unit.rows(half) for half in range(plan.halves)], turned_ref)
        found = first_sweep(unit, maxima)
        for half, one in enumerate(found):
            statistics(unit, half, one, count_ref[0], stats_ref)
        if plan.k:
            halves = range(plan.halves)
            bounds = [threshold(groups(unit, maxima, half), plan.k) for half in halves]
            candidates(unit, bounds, stacks)
            for half in halves:
                rest = (stacks, of_selection[2], values_ref, ids_ref)
                select_again(unit, half, bounds[half], count_ref[0], *rest)

    def put_in_order(when: jax.Array) -> None:
        if plan.k:
            pl.when(when)(lambda: order(stacks, of_selection[2], values_ref, ids_ref))

    if plan.as_blocks:  # a grid step is a block of a unit
        index, place = pl.program_id(1), pl.program_id(2)
        size = plan.block * LANES
        is_last = place == plan.width // size - 1

        @pl.when(first + index < units)
        def _widened() -> None:
            buffer[0, :, pl.ds(pl.multiple_of(place * size, size), size)] = logits_ref[...]
            pl.when(is_last)(lambda: serve(index))

        put_in_order(is_last & (index == plan.batch_units - 1) & (first < units))
        return

    @pl.when((batch == 0) & (units > 0))
    def _first() -> None:
        copies.start(0)

    def copied(index: jax.Array, _: None) -> None:
        number = first + index

        @pl.when(number + 1 < units)
        def _next() -> None:
            copies.start(number + 1)

        serve(index)

    lax.fori_loop(0, jnp.clip(units - first, 0, plan.batch_units), copied, None)
    put_in_order(first < units)


def statistics(unit: Unit, half: int, found: Found, count: jax.Array, stats_ref: Any) -> None:
    """Writes the statistics of half a unit; sweeps again where the first sweep was not enough."""
    wanted = _wanted(unit, half, count)
    rows = unit.rows(half)
    stats_ref[rows, :] = _columns([found.maximum, found.larger, found.sum_exp])

    def sums() -> None:
        _overwrite(stats_ref, rows, 2, sums_again(unit, half, found.maximum))

    def larger() -> None:
        _overwrite(stats_ref, rows, 1, [count_again(unit, half)])

    if unit.plan.entropy:
        sums()
    elif unit.plan.rare:
        pl.when(_any(~(found.excess <= MOST) & wanted))(sums)
    if unit.plan.rare:
        near_zero = jnp.abs(unit.given()[half].limit) < SMALLEST
        pl.when(_any(near_zero & wanted))(larger)


def select_again(
    unit: Unit,
    half: int,
    bound: jax.Array,
    count: jax.Array,
    stacks: Stacks,
    hard: Any,
    values_ref: Any,
    ids_ref: Any,
) -> None:
    """Scans half a unit if the stacks cannot serve one of its rows; says so in `hard`."""
    near_zero = jnp.broadcast_to(jnp.abs(bound) < SMALLEST, SHAPE)
    if not unit.plan.rare:
        hard[unit.rows(half), :] = jnp.zeros(SHAPE, jnp.float32)
        return
    unfit = near_zero | (stacks.unfit(unit.rows(half)) > 0.0)
    is_hard = _any(unfit & _wanted(unit, half, count))
    hard[unit.rows(half), :] = jnp.where(is_hard, jnp.ones(SHAPE, jnp.float32), 0.0)
    pl.when(is_hard)(lambda: scan(unit, half, values_ref, ids_ref))


def _wanted(unit: Unit, half: int, count: jax.Array) -> jax.Array:
    """[8, 128]: whether a row of half the unit is among the wanted ones."""
    place = lax.broadcasted_iota(jnp.int32, SHAPE, 0) * unit.plan.halves + half
    wanted: jax.Array = unit.number * unit.plan.unit + place < count
    return wanted


def _any(x: jax.Array) -> jax.Array:
    found: jax.Array = jnp.max(jnp.where(x, 1.0, 0.0)) > 0.0
    return found


def _columns(columns: list[jax.Array]) -> jax.Array:
    """[8, 128] with these columns [8, 1] first."""
    lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
    out = jnp.zeros(SHAPE, jnp.float32)
    for column, one in enumerate(columns):
        out = jnp.where(lanes == column, one, out)
    return out


def _overwrite(stats_ref: Any, rows: Any, first: int, columns: list[jax.Array]) -> None:
    lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
    out = stats_ref[rows, :]
    for i, one in enumerate(columns):
        out = jnp.where(lanes == first + i, one, out)
    stats_ref[rows, :] = out


def call(
    plan: Plan,
    interpret: Any,
    count: jax.Array,
    rows: jax.Array,
    logits: jax.Array,
    given: jax.Array,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the kernel.

    Args:
      plan: of these arrays.
      interpret: `pltpu.InterpretParams`, or False.
      count: [1] int32, the number of target rows to work on.
      rows: [num_units * unit] int32, the row of logits of each target where they are gathered (of
        16-bit logits, the first of the two rows of its word); else [1].
      logits: [N, V] bfloat16 or float32; of a plan for float16, these as float32.
      given: [num_batches * batch_rows, 3] int32, `unit.Given` of every target.
      allowed: [num_batches * batch_rows, words] int32 where tokens are masked, bits as those of
        `changes.Changes`.

    Returns:
      Statistics [rows, 128] float32, columns of the maximum, the number of larger logits and the
      sums; the top K's logits [rows, width] float32
      and ids [rows, width] int32. Rows, as those of `given`, are in the order of `run.in_units`.
    """
    batch, slots = plan.batch_rows, (plan.slots, plan.batch_rows, LANES)
    widths = (LANES, plan.out_width, plan.out_width)
    dtypes = (jnp.float32, jnp.float32, jnp.int32)
    buffers = 2
    grid: tuple[int, ...] = (plan.num_batches,)
    of_logits = pl.BlockSpec(memory_space=pltpu.HBM)
    if plan.as_blocks:
        size = plan.block * LANES
        buffers, grid = 1, (plan.num_batches, plan.batch_units, plan.width // size)
        of_logits = pl.BlockSpec((plan.unit, size), functools.partial(wanted_block, plan))
    scratch: list[Any] = [
        pltpu.VMEM((buffers, plan.buffer_rows, plan.width), logits.dtype),
        pltpu.VMEM((plan.sections, plan.halves * SUBLANES, LANES), jnp.float32),
    ]
    if plan.k:
        shapes = (slots, slots, slots[1:])
        scratch += [pltpu.VMEM(shape, jnp.float32) for shape in shapes]
    if plan.masked:
        scratch.append(pltpu.VMEM((plan.unit, plan.words), jnp.int32))
    if not plan.as_blocks:
        scratch.append(pltpu.SemaphoreType.DMA((2, plan.num_chunks)))
    every = [given] if allowed is None else [given, allowed]
    run = pl.pallas_call(
        functools.partial(body, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[
                of_logits,
                *[pl.BlockSpec((batch, x.shape[1]), lambda i, *_: (i, 0)) for x in every],
            ],
            out_specs=[pl.BlockSpec((batch, width), lambda i, *_: (i, 0)) for width in widths],
            scratch_shapes=scratch,
        ),
        out_shape=[
            like(given, (plan.num_batches * batch, width), dtype)
            for width, dtype in zip(widths, dtypes, strict=True)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple("arbitrary" for _ in grid),
            # float16 becomes float32 where a block is loaded, by an instruction that XLA has and
            # Mosaic has not: nothing of float32 is written to HBM.
            allow_input_fusion=(False, False, plan.as_blocks, *[False] * len(every)),
            # The starts of copies are from shapes, or from row ids in range: the interpreter looks
            # at each. Checked by the chip, a copy takes twice as many cycles to start.
            disable_bounds_checks=True,
            vmem_limit_bytes=plan.vmem_bytes,
        ),
        interpret=interpret,
        name="topk_logprobs",
    )
    if not (plan.interpreted or plan.as_blocks):  # XLA might copy all rows to VMEM first
        logits = pltpu.with_memory_space_constraint(logits, pltpu.HBM)
    return tuple(run(count, rows, logits, *every))


def wanted_block(
    plan: Plan, batch: Any, index: Any, place: Any, count: Any, _: Any
) -> tuple[Any, Any]:
    """The block of a grid step; the last wanted one again where there are no more: no copy."""
    last = jnp.maximum(lax.div(count[0] + (plan.unit - 1), plan.unit) - 1, 0)
    unit = batch * plan.batch_units + index
    end = plan.width // (plan.block * LANES) - 1
    return jnp.minimum(unit, last), jnp.where(unit > last, end, place)


def like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """An output's type, which varies over the mesh axes of `shard_map` over which x does."""
    varying = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # type: ignore[no-untyped-call]
