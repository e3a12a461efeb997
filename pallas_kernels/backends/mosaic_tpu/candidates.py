"""Candidates for the top K: what reaches a bound, on stacks, one in each lane.

One sweep over the cells' maxima (`cells.py`) pushes the largest logit of each cell that reaches the
bound. The cells of a few rows have several candidates: these are read again, and each is pushed.

Of other ways these took more cycles: every logit compared and pushed (11 operations a logit, not
2.5); the largest of 8 columns, found among them with its place (5, and 2 more to know whether the
others reach the bound).
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_tpu.cells import (
    Cells,
    Maxima,
    cell_of,
    code,
    code_of_column,
    first_codes,
    has_several,
    next_code,
    square_maxima,
)
from pallas_kernels.backends.mosaic_tpu.schedule import LANES, Schedule
from pallas_kernels.backends.mosaic_tpu.unit import SHAPE, Index, Span, Unit, masked
from pallas_kernels.lowering.row_pieces import in_pairs as tree

MAGNITUDE = 0x7FFFFFFF
MIN_NORMAL_BITS = 0x00800000  # float32's smallest normal number

Stack = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]  # depth + 1 logits, depth codes


class Stacks(NamedTuple):
    """The stacks of a batch, one a lane of each section of a row; -inf: no candidate."""

    schedule: Schedule
    logits: jax.Ref  # [sections * (depth + 1), batch rows, 128] float32; more than depth: overflow
    places: jax.Ref  # as many codes (`cells.py`), or ids; the last are not used

    def clear(self, rows: Span) -> None:
        for slot in range(self.schedule.slots):
            self.logits[slot, rows, :] = jnp.full(SHAPE, -jnp.inf, jnp.float32)
            self.places[slot, rows, :] = jnp.zeros(SHAPE, jnp.float32)

    def load(self, section: Index, rows: Span) -> Stack:
        depth = self.schedule.depth
        first = section * (depth + 1)
        logits = tuple(self.logits[first + i, rows, :] for i in range(depth + 1))
        return logits, tuple(self.places[first + i, rows, :] for i in range(depth))

    def store(self, section: Index, rows: Span, stack: Stack) -> None:
        first = section * (self.schedule.depth + 1)
        for i, x in enumerate(stack[0]):
            self.logits[first + i, rows, :] = x
        for i, x in enumerate(stack[1]):
            self.places[first + i, rows, :] = x

    def unfit(self, rows: Span) -> jax.Array:
        """1.0 in lanes [8, 128] that lost a candidate, or have one whose order is not certain.

        Floats compare subnormal numbers as if they were zeros.
        """
        depth = self.schedule.depth
        flags = []
        for slot in range(self.schedule.slots):
            x = self.logits[slot, rows, :]
            if slot % (depth + 1) == depth:
                bad = x > -jnp.inf
            else:
                size = lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE
                bad = (size > 0) & (size < MIN_NORMAL_BITS)
            flags.append(jnp.where(bad, 1.0, 0.0))
        return tree(jnp.maximum, flags)


def push(stack: Stack, logit: jax.Array, place: jax.Array, pushed: jax.Array) -> Stack:
    """The stack with a candidate more, and the code of its place, in lanes where it is pushed."""
    logits, codes = stack
    above = (logit, *logits[:-1])
    logits = tuple(jnp.where(pushed, new, old) for new, old in zip(above, logits, strict=True))
    after = (place, *codes[:-1])
    codes = tuple(jnp.where(pushed, new, old) for new, old in zip(after, codes, strict=True))
    return logits, codes


def push_candidates(unit: Unit, cells: Cells, bounds: list[jax.Array], stacks: Stacks) -> None:
    """Pushes what reaches the bounds [8, 1] of each half on the stacks."""
    schedule, constants = unit.schedule, unit.constants()
    halves = range(schedule.halves)
    bound = [jnp.broadcast_to(x, SHAPE) for x in bounds]
    for half in halves:
        stacks.clear(unit.rows(half))

    def maxima(index: Index, tokens: int) -> Iterator[list[Maxima]]:
        """Of each cell of a chunk, of each half."""
        columns, first = -(-tokens // LANES), index * (schedule.chunk // schedule.cell)
        if schedule.kept:
            for cell in range(-(-columns // schedule.cell)):
                yield [cells.load(first + cell, half) for half in halves]
            return
        size = max(schedule.step, schedule.cell)
        for begin in range(0, columns, size):
            start, number = index * schedule.chunk + begin, min(size, columns - begin)
            x = unit.load(start, number, constants)
            if begin + number == columns and tokens % LANES:
                x[-1] = tuple(masked(logits, tokens % LANES) for logits in x[-1])
            for of_cell in (x[i : i + schedule.cell] for i in range(0, number, schedule.cell)):
                yield [
                    square_maxima(schedule, [column[half] for column in of_cell]) for half in halves
                ]

    def chunk(index: Index, tokens: int, carry: tuple[Stack, ...]) -> tuple[Stack, ...]:
        codes = first_codes(index * (schedule.chunk // schedule.cell))
        for cell, of_halves in enumerate(maxima(index, tokens)):
            none, pushed = next_code(codes, cell), []
            for stack, of_cell, least in zip(carry, of_halves, bound, strict=True):
                place = code(schedule, of_cell, least, none)
                pushed.append(push(stack, of_cell[0], place, of_cell[0] >= least))
            carry = tuple(pushed)
        return carry

    def load(section: Index) -> tuple[Stack, ...]:
        return tuple(stacks.load(section, unit.rows(half)) for half in halves)

    def store(section: Index, carry: tuple[Stack, ...]) -> None:
        for half in halves:
            stacks.store(section, unit.rows(half), carry[half])

    def chunk_of_section(index: Index, tokens: int, _: None) -> None:
        section = unit.section(index)
        store(section, chunk(index, tokens, load(section)))

    if schedule.sections == 1:
        store(0, unit.over_chunks(chunk, load(0)))
    else:
        unit.over_chunks(chunk_of_section, None)


def part_cells(unit: Unit, bounds: list[jax.Array], count: jax.Array, stacks: Stacks) -> None:
    """Pushes each candidate of the cells that have several, in place of the largest logit alone.

    It reads those steps of the vocabulary again in which there is such a cell, one after the other.
    """
    schedule, constants = unit.schedule, unit.constants()
    halves = range(schedule.halves)
    size = max(schedule.step, schedule.cell)
    steps, rest = divmod(schedule.vocabulary, size * LANES)
    end = steps + (rest > 0)

    def steps_of(stack: Stack) -> list[jax.Array]:
        """Of each slot the step [8, 128] that must be read again; `end` where there is none."""
        return [
            jnp.where((logit > -jnp.inf) & has_several(codes), step_of(codes), end)
            for logit, codes in zip(*stack, strict=False)
        ]

    def step_of(codes: jax.Array) -> jax.Array:
        return lax.div(cell_of(codes), size // schedule.cell)

    def first_step() -> jax.Array:
        every = [
            jnp.where(unit.is_active(half, count), step.astype(jnp.float32), float(end))
            for section in range(schedule.sections)
            for half in halves
            for step in steps_of(stacks.load(section, unit.rows(half)))
        ]
        return jnp.min(tree(jnp.minimum, every)).astype(jnp.int32)

    def part(step: jax.Array, tokens: int) -> None:
        start = step * size
        section = unit.section(lax.div(start, schedule.chunk))
        loaded = unit.load(start, -(-tokens // LANES), constants)
        if tokens % LANES:  # what follows the last token is not of the row
            loaded[-1] = tuple(masked(x, tokens % LANES) for x in loaded[-1])
        first = first_codes(lax.div(start, schedule.cell))
        for half in halves:
            stack = stacks.load(section, unit.rows(half))
            logits = tuple(
                jnp.where(place == step, -jnp.inf, logit)
                for logit, place in zip(stack[0], steps_of(stack), strict=False)
            )
            stack = (*logits, stack[0][-1]), stack[1]
            x = [column[half] for column in loaded]
            bound = jnp.broadcast_to(bounds[half], SHAPE)
            stacks.store(section, unit.rows(half), _push_each(schedule, stack, x, first, bound))

    def read(step: jax.Array) -> jax.Array:
        if steps:
            pl.when(step < steps)(lambda: part(step, size * LANES))
        if rest:
            pl.when(step == steps)(lambda: part(jnp.int32(steps), rest))
        return first_step()

    lax.while_loop(lambda step: step < end, read, first_step())


def _push_each(
    schedule: Schedule, stack: Stack, x: list[jax.Array], first: jax.Array, bound: jax.Array
) -> Stack:
    """Pushes each candidate of those cells of a step that have several."""
    for cell, begin in enumerate(range(0, len(x), schedule.cell)):
        of_cell = x[begin : begin + schedule.cell]
        codes = next_code(first, cell)
        several = has_several(code(schedule, square_maxima(schedule, of_cell), bound, codes))
        for column, logit in enumerate(of_cell):
            lost = stack[0][-1]
            pushed = several & (logit >= bound)
            logits, places = push(stack, logit, code_of_column(codes, column), pushed)
            # A place that was emptied may come to the one of overflow.
            stack = (*logits[:-1], jnp.maximum(logits[-1], lost)), places
    return stack
