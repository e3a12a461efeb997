"""Groups of rows that are sampled, on a TPU: the maximum and the sum of exponentials of each.

A group is 256 tokens, so two vectors of a row's lanes: the terms of both are added, then the lanes,
in the order in which the chip reduces them. So a sum's bits depend on the group's logits and the
temperature alone. Where a shard's first group begins inside a vector, a group's vectors are put
together from three, and their terms turned to the lanes that they have elsewhere before these are
added.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_tpu.rows_kernel import like
from pallas_kernels.backends.mosaic_tpu.schedule import LANES, SUBLANES, Schedule
from pallas_kernels.backends.mosaic_tpu.unit import (
    LOG2_E,
    SHAPE,
    Copies,
    Halves,
    Index,
    Interpret,
    Unit,
    aligned,
)

PAIR = 2  # vectors of a group
TURN = 64  # columns that a turn of the loop works on: reductions over lanes take long, side by side


class Groups(NamedTuple):
    """What is read as groups. Hashable."""

    tokens: int  # from the first group on
    has_offset: bool  # whether the first group begins at a column that only the program knows
    raw: bool  # whether the sums at temperature 1 are wanted, too

    @property
    def number(self) -> int:
        return -(-self.tokens // (PAIR * LANES))

    @property
    def width(self) -> int:
        """Groups that a row of the outputs has room for."""
        return -(-self.number // LANES) * LANES


def body(schedule: Schedule, groups: Groups, *refs: jax.Ref) -> None:
    """One grid step: a unit of rows, or a block of it."""
    offset_ref, logits_ref, constants_ref, *rest = refs
    semaphores = None if schedule.as_blocks else rest.pop()
    *outputs, buffer = rest
    number = pl.program_id(0)
    copies = Copies(schedule, logits_ref, None, buffer, semaphores)
    unit = Unit(schedule, copies, number, 0, buffer, constants_ref, None)
    if schedule.as_blocks:
        place, size = pl.program_id(1), schedule.block * LANES
        buffer[0, :, pl.ds(pl.multiple_of(place * size, size), size)] = logits_ref[...]
        is_last = place == schedule.width // size - 1
        pl.when(is_last)(lambda: read_unit(unit, groups, offset_ref[0], outputs))
        return
    pl.when(number == 0)(lambda: copies.start(0))
    pl.when(number + 1 < schedule.num_units)(lambda: copies.start(number + 1))
    read_unit(unit, groups, offset_ref[0], outputs)


def read_unit(unit: Unit, groups: Groups, offset: jax.Array, outputs: list[jax.Ref]) -> None:
    """Writes a unit's maxima, its sums and those at temperature 1, [unit, width] each."""
    schedule, constants = unit.schedule, unit.constants()
    size = max(PAIR, min(TURN, schedule.chunk // PAIR * PAIR))
    lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
    first, lane = lax.div(offset, LANES), lax.rem(offset, LANES)

    def turn(start: Index, tokens: int) -> None:
        number = -(-tokens // LANES)
        loaded = unit.load(start + first, number + 1, constants) if groups.has_offset else None
        if loaded is None:
            loaded = unit.load(start, number, constants)
        else:
            loaded = [
                tuple(jnp.where(lanes >= lane, a, b) for a, b in zip(x, y, strict=True))
                for x, y in itertools.pairwise(loaded)
            ]
        if tokens % LANES:
            is_token = lanes < tokens % LANES
            loaded[-1] = tuple(jnp.where(is_token, x, -jnp.inf) for x in loaded[-1])
        for half in range(schedule.halves):
            pairs = [loaded[i : i + PAIR] for i in range(0, number, PAIR)]
            write(half, lax.div(jnp.int32(start), PAIR), [of_group(x, half) for x in pairs])

    def of_group(vectors: list[Halves], half: int) -> list[jax.Array]:
        x = [vector[half] for vector in vectors]
        maximum = jnp.max(functools.reduce(jnp.maximum, x), axis=1, keepdims=True)
        reference = jnp.where(maximum > -jnp.inf, maximum, 0.0)  # of -inf alone, or NaN
        statistics = [maximum]
        for scale in (constants[half].scale, jnp.float32(LOG2_E))[: 1 + groups.raw]:
            terms = functools.reduce(
                jnp.add, [jnp.exp2((logits - reference) * scale) for logits in x]
            )
            if groups.has_offset:
                terms = pltpu.roll(terms, LANES - lane, 1)
            statistics.append(jnp.sum(terms, axis=1, keepdims=True))
        return statistics

    def write(half: int, group: Index, statistics: list[list[jax.Array]]) -> None:
        block = pl.ds(half * SUBLANES, SUBLANES), pl.ds(aligned(group & -LANES, LANES), LANES)
        for ref, columns in zip(outputs, zip(*statistics, strict=True), strict=True):
            out = ref[block]
            for i, column in enumerate(columns):
                out = jnp.where(lanes == (group & (LANES - 1)) + i, column, out)
            ref[block] = out

    def of_chunk(chunk: Index, tokens: int) -> None:
        start = chunk * schedule.chunk
        turns, rest = divmod(tokens, size * LANES)

        def full(i: jax.Array, _: None) -> None:
            turn(start + i * size, size * LANES)

        if turns:
            lax.fori_loop(0, turns, full, None)
        if rest:
            turn(start + turns * size, rest)

    wait = functools.partial(_wait, unit)
    # The last vectors of a chunk may have their other part in the next one.
    ahead = int(groups.has_offset)
    chunks, rest = divmod(groups.tokens, schedule.chunk * LANES)

    def full_chunk(index: jax.Array, _: None) -> None:
        wait(index + ahead)
        of_chunk(index, schedule.chunk * LANES)

    if ahead:
        wait(jnp.int32(0))
    if chunks:
        lax.fori_loop(0, chunks, full_chunk, None)
    for chunk in range(chunks + ahead, schedule.num_chunks):  # every copy is waited for
        wait(jnp.int32(chunk))
    if rest:
        of_chunk(chunks, rest)


def _wait(unit: Unit, chunk: jax.Array) -> None:
    """Waits for a chunk, if there is one of this number."""
    last, tokens = unit.schedule.num_chunks - 1, unit.schedule.chunk * LANES
    rest = unit.schedule.vocabulary - last * tokens
    if last:
        pl.when(chunk < last)(lambda: unit.copies.wait(unit.number, chunk, tokens))
    pl.when(chunk == last)(lambda: unit.copies.wait(unit.number, jnp.int32(last), rest))


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
    outputs = 2 + groups.raw
    run = pl.pallas_call(
        functools.partial(body, schedule, groups),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                of_logits,
                pl.BlockSpec((schedule.unit, constants.shape[1]), lambda i, *_: (i, 0)),
            ],
            out_specs=[of_groups] * outputs,
            scratch_shapes=[
                pltpu.VMEM(
                    (buffers, *schedule.buffer), jnp.int32 if schedule.as_words else logits.dtype
                ),
                *semaphores,
            ],
        ),
        out_shape=[like(constants, (rows, groups.width), jnp.float32)] * outputs,
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
