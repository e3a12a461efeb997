"""The TPU kernel: rows come from HBM to VMEM once, and everything else happens there.

A grid step serves a batch of target rows, unit by unit. While a unit is worked on, the copies of
the next one run. One sweep over its logits in VMEM makes groups' sums, a count and maxima of lanes
and of cells (`group_sweep.py`); from the cells come candidates for the top K (`candidates.py`):
whatever reaches the K-th largest of the row's lane maxima (`threshold`). When all units of the
batch are done, the K largest are taken from the stacks of all their rows at once (`order`).

Rare rows take another sweep: those whose stacks overflow, or whose order is that of subnormal
numbers (`scan`).

The file goes from the parts to the whole: the bound of the candidates, their order, the scan of
rare rows, the sweeps, and at its end the kernel.

Of other ways these took more cycles: float16 by integer operations (106,571 cycles at K = 20);
integers in the count of larger logits (an operation more).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.backends.mosaic_tpu.candidates import Stacks, part_cells, push_candidates
from pallas_kernels.backends.mosaic_tpu.cells import (
    Cells,
    columns_of,
    half_of,
    square_maxima,
)
from pallas_kernels.backends.mosaic_tpu.group_sweep import LOWEST, Groups, Sweep, memory
from pallas_kernels.backends.mosaic_tpu.schedule import LANES, SUBLANES, Schedule
from pallas_kernels.backends.mosaic_tpu.unit import (
    SHAPE,
    Copies,
    Halves,
    Index,
    Interpret,
    Span,
    Unit,
    chains,
    turn_bits,
)
from pallas_kernels.lowering.row_pieces import in_pairs as tree
from pallas_kernels.numbers.ordered_keys import as_integers, floats, ordered_keys, turned

MIN_INT = -(1 << 31)
MIN_NORMAL = 1.1754943508222875e-38  # float32's smallest normal number
INFINITY = 0x7F800000  # as bits; minus it is the key of -inf
_HALF = 16  # bits, of which float32 holds every number
NO_ID = float(2**24)

Pair = tuple[jax.Array, jax.Array]  # of logits and of their columns or tokens
Vectors = tuple[jax.Array, ...]


def threshold(groups: list[jax.Array], k: int) -> jax.Array:
    """The K-th largest of rows' group maxima [8, 128] each: [8, 1] float32, LOWEST or more.

    K groups have a logit that reaches it, so K logits do. Groups may be any disjoint sets of
    tokens: here they are lanes, whose maxima need no reduction over lanes.

    Every group counts the groups that are as large: 128 comparisons a register, and no order.
    """
    turned = [jnp.transpose(group) for group in groups]  # [128, 8]: groups on sublanes
    place = lax.broadcasted_iota(jnp.int32, SHAPE, 0)
    bound = jnp.full((SUBLANES, 1), LOWEST, jnp.float32)
    for group in groups:
        reached = jnp.zeros(SHAPE, jnp.float32)  # by how many groups each is
        for row in range(SUBLANES):
            maxima = group[row : row + 1]
            larger = [jnp.where(x[:, row : row + 1] >= maxima, 1.0, 0.0) for x in turned]
            count = jnp.sum(tree(jnp.add, larger), axis=0, keepdims=True)
            reached = jnp.where(place == row, count, reached)
        kth = jnp.max(jnp.where(reached >= k, group, LOWEST), axis=1, keepdims=True)
        bound = jnp.maximum(bound, kth)
    return bound


def order(stacks: Stacks, hard: jax.Ref, values_ref: jax.Ref, ids_ref: jax.Ref) -> None:
    """K times the largest candidate of each row, ties lowest id first: [batch rows, width].

    hard [batch rows, 128] float32: more than 0 where a row's results are there already.
    """
    schedule = stacks.schedule
    used = [slot for slot in range(schedule.slots) if slot % (schedule.depth + 1) < schedule.depth]
    lanes = lax.broadcasted_iota(jnp.int32, (schedule.batch_rows, LANES), 1)
    easy = hard[...] == 0.0
    for slot in used:  # from here on ids, not codes
        columns = columns_of(schedule, stacks.places[slot])
        stacks.places[slot] = (columns * LANES + lanes).astype(jnp.float32)

    def take(rank: jax.Array, _: None) -> None:
        largest = tree(jnp.maximum, [stacks.logits[slot] for slot in used])
        largest = jnp.max(largest, axis=1, keepdims=True)
        equal = [
            jnp.where(stacks.logits[slot] == largest, stacks.places[slot], NO_ID) for slot in used
        ]
        first = jnp.min(tree(jnp.minimum, equal), axis=1, keepdims=True)
        for slot, ids in zip(used, equal, strict=True):
            stacks.logits[slot] = jnp.where(ids == first, -jnp.inf, stacks.logits[slot])
        write(rank, largest + 0.0, first.astype(jnp.int32), easy, values_ref, ids_ref)

    lax.fori_loop(0, schedule.k, take, None)


def write(
    rank: jax.Array,
    values: jax.Array,
    ids: jax.Array,
    rows: jax.Array,
    values_ref: jax.Ref,
    ids_ref: jax.Ref,
    at: Span = slice(None),
) -> None:
    """Write values and ids [n, 1] to column `rank` of the outputs' rows `at`, where `rows` says."""
    block = pl.ds(pl.multiple_of(rank & -LANES, LANES), LANES)
    lanes = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    at_rank = (lanes == (rank & (LANES - 1))) & rows
    values_ref[at, block] = jnp.where(at_rank, values, values_ref[at, block])
    ids_ref[at, block] = jnp.where(at_rank, ids, ids_ref[at, block])


def scan(unit: Unit, half: int, values_ref: jax.Ref, ids_ref: jax.Ref) -> None:
    """Writes the top K of half a unit that has too many candidates for the stacks: by K sweeps.

    Rows of equal logits take it, and rows whose K-th largest logit is near 0: logits are compared
    as integers here, which keeps subnormal numbers apart.
    """
    constants = unit.constants()
    lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
    all_rows = jnp.full(SHAPE, True, bool)

    def take(rank: jax.Array, last: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        last_key, last_id = (jnp.broadcast_to(x, SHAPE) for x in last)

        def step(loaded: list[Halves], start: Index, carry: Pair) -> Pair:
            best, best_id = carry
            for i, column in enumerate(loaded):
                key = ordered_keys(column[half])
                token = (start + i) * LANES + lanes
                later = (key < last_key) | ((key == last_key) & (token > last_id))
                better = later & (key > best)
                best = jnp.where(better, key, best)
                best_id = jnp.where(better, token, best_id)
            return best, best_id

        def chunk(index: Index, tokens: int, carry: Pair) -> Pair:
            return unit.over_columns(index, tokens, constants, step, carry)

        initial = jnp.full(SHAPE, -INFINITY, jnp.int32), jnp.zeros(SHAPE, jnp.int32)
        best, best_id = unit.over_chunks(chunk, initial)
        # Reductions over lanes are those of floats.
        upper = (best >> _HALF).astype(jnp.float32)
        lower = (best & 0xFFFF).astype(jnp.float32)
        first = jnp.max(upper, axis=1, keepdims=True)
        second = jnp.max(jnp.where(upper == first, lower, -1.0), axis=1, keepdims=True)
        is_best = (upper == first) & (lower == second)
        token = jnp.where(is_best, best_id.astype(jnp.float32), NO_ID)
        token_id = jnp.min(token, axis=1, keepdims=True).astype(jnp.int32)
        key = (first.astype(jnp.int32) << _HALF) | second.astype(jnp.int32)
        value = floats(key, jnp.float32)
        write(rank, value, token_id, all_rows, values_ref, ids_ref, unit.rows(half))
        return key, token_id

    before = jnp.full((SUBLANES, 1), -MIN_INT - 1, jnp.int32), jnp.zeros((SUBLANES, 1), jnp.int32)
    lax.fori_loop(0, unit.schedule.k, take, before)


def lane_sweep(unit: Unit, cells: Cells | None, maxima: jax.Ref) -> list[jax.Array]:
    """The larger logits in each lane, as `Sweep.run`; waits for the unit's chunks one by one.

    Leaves the largest logit of every lane of every section in maxima [sections, unit, 128].
    """
    schedule, constants = unit.schedule, unit.constants()
    least, zero = jnp.full(SHAPE, -jnp.inf, jnp.float32), jnp.zeros(SHAPE, jnp.float32)
    for section in range(schedule.sections):
        for half in range(schedule.halves):
            maxima[section, half_of(half), :] = least

    def step(loaded: list[Halves], start: Index, carry: tuple[Pair, ...]) -> tuple[Pair, ...]:
        out, first = [*carry], lax.div(jnp.int32(start), schedule.cell)
        for number, begin in enumerate(range(0, len(loaded), schedule.cell)):
            for half, (maximum, larger) in enumerate(out):
                x = [column[half] for column in loaded[begin : begin + schedule.cell]]
                for logits in x:
                    larger = larger + jnp.where(logits > constants[half].limit, 1.0, 0.0)
                if cells is not None:
                    of_cell = square_maxima(schedule, x)
                    maximum = jnp.maximum(maximum, of_cell[0])
                    cells.store(first + number, half, of_cell)
                out[half] = maximum, larger
        return tuple(out)

    def chunk(index: Index, tokens: int, totals: Vectors) -> Vectors:
        unit.copies.wait(unit.number, index, tokens)
        begin = ((least, zero),) * schedule.halves
        ended = unit.over_columns(index, tokens, constants, step, begin, schedule.first_step)
        section = unit.section(index)
        for half, (maximum, _) in enumerate(ended):
            rows = half_of(half)
            maxima[section, rows, :] = jnp.maximum(maxima[section, rows, :], maximum)
        return tuple(total + larger for total, (_, larger) in zip(totals, ended, strict=True))

    totals: Vectors = unit.over_chunks(chunk, (zero,) * schedule.halves)
    return list(totals)


def groups(unit: Unit, maxima: jax.Ref, half: int) -> list[jax.Array]:
    """The sections' maxima [8, 128] of half the unit."""
    return [maxima[section, half_of(half), :] for section in range(unit.schedule.sections)]


def count_again(unit: Unit, half: int) -> jax.Array:
    """The number [8, 1] of larger logits of half a unit, compared as integers.

    Floats compare subnormal numbers as if they were zeros.
    """
    constants = unit.constants()
    turn, limit = turned(constants[half].limit)

    def step(loaded: list[Halves], _: Index, larger: jax.Array) -> jax.Array:
        x = [as_integers(column[half]) ^ turn for column in loaded]
        more: jax.Array = chains(jnp.add, [jnp.where(key > limit, 1.0, 0.0) for key in x])
        return larger + more

    def chunk(index: Index, tokens: int, larger: jax.Array) -> jax.Array:
        return unit.over_columns(index, tokens, constants, step, larger)

    larger = unit.over_chunks(chunk, jnp.zeros(SHAPE, jnp.float32))
    return jnp.sum(larger, axis=1, keepdims=True)


def body(schedule: Schedule, *refs: jax.Ref) -> None:
    """One grid step."""
    count_ref, rows_ref, logits_ref, constants_ref, *rest = refs
    allowed_ref = rest.pop(0) if schedule.masked else None
    semaphores = None if schedule.as_blocks else rest.pop()
    turned_ref = rest.pop() if schedule.masked else None
    larger_ref, values_ref, ids_ref, *rest = rest
    of_groups = groups_of(schedule)
    outputs = rest[: of_groups.outputs] if schedule.grouped else []
    buffer, maxima, *of_selection = rest[len(outputs) :]
    cells = Cells(schedule, of_selection.pop(0) if schedule.has_maxima else None)
    waiting = (of_selection.pop(), of_selection.pop()) if schedule.grouped else None
    batch = pl.program_id(0)
    units = lax.div(count_ref[0] + (schedule.unit - 1), schedule.unit)
    first = batch * schedule.batch_units
    copies = Copies(schedule, logits_ref, rows_ref, buffer, semaphores)
    stacks = Stacks(schedule, *(of_selection[:2] if schedule.k else (None, None)))

    def serve(index: jax.Array) -> None:
        number = first + index
        unit = Unit(schedule, copies, number, index, buffer, constants_ref, turned_ref)
        if allowed_ref is not None and turned_ref is not None:
            turn_bits(
                schedule,
                allowed_ref,
                [unit.rows(half) for half in range(schedule.halves)],
                turned_ref,
            )
        halves = range(schedule.halves)

        def bounds_of() -> list[jax.Array]:
            wanted = halves if schedule.k else []
            return [threshold(groups(unit, maxima, half), schedule.k) for half in wanted]

        if waiting is None:
            larger = lane_sweep(unit, cells if schedule.k else None, maxima)
            bounds = bounds_of()
        else:
            lane_maxima = maxima if schedule.k else None
            sweep = Sweep(unit, of_groups, outputs, waiting, cells, lane_maxima)
            larger, bounds = sweep.run(bounds_of)
        for half, of_lanes in enumerate(larger):
            write_larger(unit, half, of_lanes, count_ref[0], larger_ref)
        if schedule.k:
            push_candidates(unit, cells, bounds, stacks)
            if schedule.rare:
                part_cells(unit, bounds, count_ref[0], stacks)
            for half in halves:
                rest = (stacks, of_selection[2], values_ref, ids_ref)
                select_again(unit, half, bounds[half], count_ref[0], *rest)

    def put_in_order(when: jax.Array) -> None:
        if schedule.k:
            pl.when(when)(lambda: order(stacks, of_selection[2], values_ref, ids_ref))

    if schedule.as_blocks:  # a grid step is a block of a unit
        index, place = pl.program_id(1), pl.program_id(2)
        size = schedule.block * LANES
        is_last = place == schedule.width // size - 1

        @pl.when(first + index < units)
        def _widened() -> None:
            buffer[0, :, pl.ds(pl.multiple_of(place * size, size), size)] = logits_ref[...]
            pl.when(is_last)(lambda: serve(index))

        put_in_order(is_last & (index == schedule.batch_units - 1) & (first < units))
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

    lax.fori_loop(0, jnp.clip(units - first, 0, schedule.batch_units), copied, None)
    put_in_order(first < units)


def write_larger(
    unit: Unit, half: int, of_lanes: jax.Array, count: jax.Array, larger_ref: jax.Ref
) -> None:
    """Writes the number of larger logits of half a unit; counts again where zeros are compared."""
    rows = unit.rows(half)
    larger = jnp.sum(of_lanes, axis=1, keepdims=True)
    larger_ref[rows, :] = jnp.broadcast_to(larger, SHAPE)

    def again() -> None:
        larger_ref[rows, :] = jnp.broadcast_to(count_again(unit, half), SHAPE)

    if unit.schedule.rare:
        near_zero = jnp.abs(unit.constants()[half].limit) < MIN_NORMAL
        pl.when(_any(near_zero & unit.is_active(half, count)))(again)


def select_again(
    unit: Unit,
    half: int,
    bound: jax.Array,
    count: jax.Array,
    stacks: Stacks,
    hard: jax.Ref,
    values_ref: jax.Ref,
    ids_ref: jax.Ref,
) -> None:
    """Scans half a unit if the stacks cannot serve one of its rows; says so in `hard`."""
    near_zero = jnp.broadcast_to(jnp.abs(bound) < MIN_NORMAL, SHAPE)
    if not unit.schedule.rare:
        hard[unit.rows(half), :] = jnp.zeros(SHAPE, jnp.float32)
        return
    unfit = near_zero | (stacks.unfit(unit.rows(half)) > 0.0)
    is_hard = _any(unfit & unit.is_active(half, count))
    hard[unit.rows(half), :] = jnp.where(is_hard, jnp.ones(SHAPE, jnp.float32), 0.0)
    pl.when(is_hard)(lambda: scan(unit, half, values_ref, ids_ref))


def _any(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(x, 1.0, 0.0)) > 0.0


def groups_of(schedule: Schedule) -> Groups:
    """The groups that the kernel reads."""
    return Groups(schedule.vocabulary, weighted=schedule.entropy, counted=True)


def call(
    schedule: Schedule,
    interpret: Interpret,
    count: jax.Array,
    rows: jax.Array,
    logits: jax.Array,
    constants: jax.Array,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Run the kernel.

    Args:
      schedule: of these arrays.
      interpret: `pltpu.InterpretParams`, or False.
      count: [1] int32, the number of target rows to work on.
      rows: [num_units * unit] int32, the row of logits of each target where they are gathered (of
        16-bit logits, the first of the two rows of its word); else [1].
      logits: [N, V] bfloat16 or float32; of a schedule for float16, these as float32.
      constants: [num_batches * batch_rows, 3] int32, `unit.RowConstants` of every target.
      allowed: [num_batches * batch_rows, words] int32 where tokens are masked, bits as those of
        `changes.Changes`.

    Returns:
      The number of larger logits [rows, 128] float32, in all columns; the top K's logits
      [rows, width] float32 and ids [rows, width] int32; of a grouped schedule the maxima, sums and,
      for the entropy, weighted sums of the groups, [rows, group_width] float32. Rows, as those of
      `constants`, are in the order of `run.in_units`.
    """
    batch, slots = schedule.batch_rows, (schedule.slots, schedule.batch_rows, LANES)
    widths = [LANES, schedule.out_width, schedule.out_width]
    dtypes = [jnp.float32, jnp.float32, jnp.int32]
    if schedule.grouped:
        groups = groups_of(schedule)
        widths += [groups.width] * groups.outputs
        dtypes += [jnp.float32] * groups.outputs
    buffers = 2
    grid: tuple[int, ...] = (schedule.num_batches,)
    of_logits = pl.BlockSpec(memory_space=pltpu.HBM)
    if schedule.as_blocks:
        size = schedule.block * LANES
        buffers, grid = 1, (schedule.num_batches, schedule.batch_units, schedule.width // size)
        of_logits = pl.BlockSpec((schedule.unit, size), functools.partial(wanted_block, schedule))
    scratch = [
        pltpu.VMEM((buffers, *schedule.buffer), jnp.int32 if schedule.as_words else logits.dtype),
        pltpu.VMEM((schedule.sections, schedule.halves * SUBLANES, LANES), jnp.float32),
    ]
    if schedule.has_maxima:
        shape = schedule.num_cells * schedule.cell_maxima, schedule.halves * SUBLANES, LANES
        scratch.append(pltpu.VMEM(shape, jnp.float32))
    if schedule.k:
        shapes = (slots, slots, slots[1:])
        scratch += [pltpu.VMEM(shape, jnp.float32) for shape in shapes]
    if schedule.grouped:
        scratch += memory(schedule)
    if schedule.masked:
        scratch.append(pltpu.VMEM((schedule.unit, schedule.words), jnp.int32))
    if not schedule.as_blocks:
        scratch.append(pltpu.SemaphoreType.DMA((2, schedule.num_chunks)))
    row_inputs = [constants] if allowed is None else [constants, allowed]
    run = pl.pallas_call(
        functools.partial(body, schedule),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[
                of_logits,
                *[pl.BlockSpec((batch, x.shape[1]), lambda i, *_: (i, 0)) for x in row_inputs],
            ],
            out_specs=[pl.BlockSpec((batch, width), lambda i, *_: (i, 0)) for width in widths],
            scratch_shapes=scratch,
        ),
        out_shape=[
            like(constants, (schedule.num_batches * batch, width), dtype)
            for width, dtype in zip(widths, dtypes, strict=True)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple("arbitrary" for _ in grid),
            # float16 becomes float32 where a block is loaded, by an instruction that XLA has and
            # Mosaic has not: nothing of float32 is written to HBM.
            allow_input_fusion=(False, False, schedule.as_blocks, *[False] * len(row_inputs)),
            # The starts of copies are from shapes, or from row ids in range: the interpreter looks
            # at each. Checked by the chip, a copy takes twice as many cycles to start.
            disable_bounds_checks=True,
            vmem_limit_bytes=schedule.vmem_bytes,
        ),
        interpret=interpret,
        name="topk_logprobs",
    )
    if not (schedule.interpreted or schedule.as_blocks):  # XLA might copy all rows to VMEM first
        logits = pltpu.with_memory_space_constraint(logits, pltpu.HBM)
    return tuple(run(count, rows, logits, *row_inputs))


def wanted_block(
    schedule: Schedule, batch: Index, index: Index, place: Index, count: jax.Ref, _: jax.Ref
) -> tuple[jax.Array, jax.Array]:
    """The block of a grid step; the last wanted one again where there are no more: no copy."""
    last = jnp.maximum(lax.div(count[0] + (schedule.unit - 1), schedule.unit) - 1, 0)
    unit = batch * schedule.batch_units + index
    end = schedule.width // (schedule.block * LANES) - 1
    return jnp.minimum(unit, last), jnp.where(unit > last, end, place)


def like(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """An output's type, which varies over the mesh axes of `shard_map` over which x does."""
    varying = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
