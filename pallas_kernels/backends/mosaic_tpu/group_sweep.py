"""One sweep over a unit's rows in VMEM: of each group of 256 tokens the maximum and the sums.

A group is two vectors of a row's lanes: the terms of both are added, then the lanes, in the order
in which the chip reduces them. So a sum's bits depend on the group's logits and the temperature
alone, and the kernel of rows and that of groups have the same ones. Where a shard's first group
begins inside a vector, a group's vectors are put together from three, and their terms turned to the
lanes that they have elsewhere before these are added.

A reduction over lanes takes long, and many run side by side. So the sweep goes in pieces: while the
terms of one are added, the maxima of the next are made, and wait in VMEM as vectors.

Of other ways these took more cycles: all maxima of a turn before its sums (11.2 cycles a group, not
5.9); pieces of 64 vectors (6.6); the sum over lanes by the matrix unit, of terms in three parts of
bfloat16 (7.0); columns of one lane written by masked stores (as many).
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_tpu.cells import Cells, Square, half_of
from pallas_kernels.backends.mosaic_tpu.schedule import LANES, PAIR, Schedule
from pallas_kernels.backends.mosaic_tpu.unit import (
    LOG2_E,
    SHAPE,
    Halves,
    Index,
    Unit,
    aligned,
)
from pallas_kernels.backends.row_totals import LEAST

Result = TypeVar("Result")
LOWEST = -3.4028234663852886e38  # float32
_TOGETHER = 8  # groups whose operations stand together: the compiler keeps to that order


class Groups(NamedTuple):
    """The groups to read. Hashable."""

    tokens: int  # from the first group on
    has_offset: bool = False  # whether the first begins at a column that only the program knows
    raw: bool = False  # whether the sums at temperature 1 are wanted, too
    weighted: bool = False  # whether those for the entropy are
    counted: bool = False  # whether larger logits are counted

    @property
    def number(self) -> int:
        return -(-self.tokens // (PAIR * LANES))

    @property
    def width(self) -> int:
        """Groups that a row of the outputs has room for."""
        return -(-self.number // LANES) * LANES

    @property
    def outputs(self) -> int:
        """Maxima, sums, those at temperature 1, weighted ones: [rows, width] each."""
        return 2 + self.raw + self.weighted


class _Piece(NamedTuple):
    """Some columns of a unit's rows."""

    start: Index  # the first, from the first group on
    tokens: int


_Item = tuple[int, int, list[jax.Array]]  # a group's place in its piece, its half, its vectors


class Sweep:
    """The sweep over a unit.

    Attributes:
      unit: its rows.
      groups: what is read of them.
      outputs: [batch rows, width] float32 each.
      waiting: [groups of a piece, 8, 128] float32 each, maxima, by turns.
      cells: their maxima, where a top K needs them.
      lane_maxima: [sections, unit, 128] float32, where it does.
      offset: [] int32, the column of the first group.
      constants: of each half.
    """

    def __init__(
        self,
        unit: Unit,
        groups: Groups,
        outputs: list[jax.Ref],
        waiting: tuple[jax.Ref, jax.Ref],
        cells: Cells | None = None,
        lane_maxima: jax.Ref | None = None,
        offset: jax.Array | None = None,
    ) -> None:
        self.unit, self.groups, self.outputs, self.waiting = unit, groups, outputs, waiting
        self.cells, self.lane_maxima, self.offset = cells, lane_maxima, offset
        self.constants = unit.constants()
        # Not a number that the compiler knows: XLA, which interprets the kernel, would multiply it
        # by that of its exponential, and round at another place than for a scale of a row.
        self.raw_scales = [
            jnp.where(constants.scale == -jnp.inf, constants.scale, jnp.float32(LOG2_E))
            for constants in self.constants
        ]

    def store(self) -> None:
        """`run` where nothing is counted."""
        self.run(lambda: None)

    def run(self, at_end: Callable[[], Result]) -> tuple[list[jax.Array], Result]:
        """Writes the outputs; returns the number of larger logits in each lane of each half.

        at_end: what follows from the lane maxima, which takes long: beside the last piece.
        """
        schedule, size = self.unit.schedule, self.unit.schedule.piece
        turns = self.groups.tokens // (2 * size * LANES)
        looped = max(turns - 1, 0)
        least = jnp.full(SHAPE, -jnp.inf, jnp.float32)
        if self.lane_maxima is not None:
            for section, half in itertools.product(
                range(schedule.sections), range(schedule.halves)
            ):
                self.lane_maxima[section, half_of(half), :] = least
        if self.groups.has_offset:  # a piece's last vectors may have a part in the next chunk
            for chunk in range(schedule.num_chunks):
                self._wait(jnp.int32(chunk))
        of_first, of_second = self.waiting
        tail = list(self._pieces(looped * 2 * size))
        first = _Piece(jnp.int32(0), size * LANES) if looped else tail[0]
        larger = [jnp.zeros(SHAPE, jnp.float32)] * schedule.halves
        self._wait_for(first)
        self._step(None, first, larger, of_second, of_first)

        def turn(i: jax.Array, larger: list[jax.Array]) -> list[jax.Array]:
            start = i * (2 * size)
            pieces = [_Piece(start + n * size, size * LANES) for n in range(3)]
            for piece in pieces[1:]:  # not between the pieces: a condition would part them
                self._wait_for(piece)
            larger = self._step(pieces[0], pieces[1], larger, of_first, of_second)
            return self._step(pieces[1], pieces[2], larger, of_second, of_first)

        if looped:
            larger = lax.fori_loop(0, looped, turn, larger)
        refs = of_first, of_second
        for piece, after in itertools.zip_longest(tail, tail[1:]):
            if after is None:
                result = at_end()
            else:
                self._wait_for(after)
            larger = self._step(piece, after, larger, *refs)
            refs = refs[::-1]
        return larger, result

    def _pieces(self, column: int) -> Iterator[_Piece]:
        """The last pieces, from a column on."""
        size = self.unit.schedule.piece
        for start in range(column, -(-self.groups.tokens // LANES), size):
            yield _Piece(start, min(size * LANES, self.groups.tokens - start * LANES))

    def _wait_for(self, piece: _Piece) -> None:
        """Waits for the chunks that begin in a piece."""
        schedule = self.unit.schedule
        if self.groups.has_offset:  # all were waited for
            return
        size = min(schedule.chunk, schedule.piece)
        for more in range(0, -(-piece.tokens // LANES), size):
            column = jnp.int32(piece.start + more)
            chunk, place = lax.div(column, schedule.chunk), lax.rem(column, schedule.chunk)
            pl.when(place == 0)(functools.partial(self._wait, chunk))

    def _wait(self, chunk: jax.Array) -> None:
        schedule, copies = self.unit.schedule, self.unit.copies
        last, tokens = schedule.num_chunks - 1, schedule.chunk * LANES
        rest = schedule.vocabulary - last * tokens
        if last:
            pl.when(chunk < last)(lambda: copies.wait(self.unit.number, chunk, tokens))
        pl.when(chunk == last)(lambda: copies.wait(self.unit.number, jnp.int32(last), rest))

    def _step(
        self,
        now: _Piece | None,
        after: _Piece | None,
        larger: list[jax.Array],
        ready: jax.Ref,
        made: jax.Ref,
    ) -> list[jax.Array]:
        """Adds up a piece, whose maxima are ready, and makes those of the next one."""
        work = [] if now is None else self._items(now)
        ahead = [] if after is None else self._items(after)
        place = None if now is None else _Place(self, now)
        larger = [*larger]
        squares = None if after is None else _Squares(self, after)
        for begin in range(0, max(len(work), len(ahead)), _TOGETHER):
            together = slice(begin, begin + _TOGETHER)
            maxima = []
            for _, half, x in ahead[together]:
                vector = functools.reduce(jnp.maximum, x)
                maxima.append(jnp.max(vector, axis=1, keepdims=True))
                if squares is not None and self.lane_maxima is not None:
                    squares.add(half, x, vector)
            for i, (group, half, x) in enumerate(work[together], begin):
                maximum = ready[i]
                if self.groups.counted:
                    limit = self.constants[half].limit
                    for logits in x:
                        larger[half] = larger[half] + jnp.where(logits > limit, 1.0, 0.0)
                assert place is not None
                place.put(group, half, [maximum, *self._sums(x, half, maximum)])
            for i, maximum in enumerate(maxima, begin):
                made[i] = jnp.broadcast_to(maximum, SHAPE)
        if place is not None:
            place.store()
        if squares is not None:
            squares.end()
        return larger

    def _sums(self, x: list[jax.Array], half: int, maximum: jax.Array) -> list[jax.Array]:
        """A group's sums [8, 1], as the outputs have them."""
        scale = self.constants[half].scale
        reference = jnp.maximum(maximum, jnp.float32(LOWEST))  # of -inf alone
        exponents = [(logits - reference) * scale for logits in x]
        terms = [jnp.exp2(exponent) for exponent in exponents]
        sums = [self._added(terms)]
        if self.groups.raw:
            once = self.raw_scales[half]
            sums.append(self._added([jnp.exp2((logits - reference) * once) for logits in x]))
        if self.groups.weighted:
            raised = [jnp.maximum(exponent, jnp.float32(LEAST * LOG2_E)) for exponent in exponents]
            sums.append(self._added([a * b for a, b in zip(terms, raised, strict=True)]))
        return sums

    def _added(self, terms: list[jax.Array]) -> jax.Array:
        total = functools.reduce(jnp.add, terms)
        if self.groups.has_offset:
            assert self.offset is not None
            total = pltpu.roll(total, LANES - lax.rem(self.offset, LANES), 1)
        return jnp.sum(total, axis=1, keepdims=True)

    def _items(self, piece: _Piece) -> list[_Item]:
        """The groups of a piece."""
        vectors = self._load(piece)
        return [
            (place, half, [vector[half] for vector in vectors[start : start + PAIR]])
            for place, start in enumerate(range(0, len(vectors), PAIR))
            for half in range(self.unit.schedule.halves)
        ]

    def _load(self, piece: _Piece) -> list[Halves]:
        unit, tokens = self.unit, piece.tokens
        constants, number = self.constants, -(-tokens // LANES)
        lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
        if self.groups.has_offset:
            assert self.offset is not None
            first, lane = lax.div(self.offset, LANES), lax.rem(self.offset, LANES)
            loaded = [
                tuple(jnp.where(lanes >= lane, a, b) for a, b in zip(x, y, strict=True))
                for x, y in itertools.pairwise(
                    unit.load(piece.start + first, number + 1, constants)
                )
            ]
        else:
            loaded = unit.load(piece.start, number, constants)
        if tokens % LANES:  # what follows the last token is not of the row
            is_token = lanes < tokens % LANES
            loaded[-1] = tuple(jnp.where(is_token, x, -jnp.inf) for x in loaded[-1])
        return loaded


class _Place:
    """Where a piece's statistics go: vectors of the outputs, until they are stored."""

    def __init__(self, sweep: Sweep, piece: _Piece) -> None:
        group = lax.div(jnp.int32(piece.start), PAIR)
        self._lane = group & (LANES - 1)
        self._lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
        tile = pl.ds(aligned(group & -LANES, LANES), LANES)
        halves = range(sweep.unit.schedule.halves)
        self._refs = [
            [(ref, (sweep.unit.rows(half), tile)) for ref in sweep.outputs] for half in halves
        ]
        # Not what the outputs hold: that waits for the piece before.
        zero = jnp.zeros(SHAPE, jnp.float32)
        self._vectors = [[zero for _ in refs] for refs in self._refs]
        self._number = sweep.unit.schedule.piece // PAIR

    def put(self, group: int, half: int, statistics: list[jax.Array]) -> None:
        """Puts a group's statistics [8, 1] or [8, 128] into its lane."""
        here = self._lanes == self._lane + group
        self._vectors[half] = [
            jnp.where(here, new, vector)
            for new, vector in zip(statistics, self._vectors[half], strict=True)
        ]

    def store(self) -> None:
        for refs, vectors in zip(self._refs, self._vectors, strict=True):
            for (ref, at), vector in zip(refs, vectors, strict=True):
                place = self._lanes - self._lane
                ref[at] = jnp.where((place >= 0) & (place < self._number), vector, ref[at])


class _Squares:
    """The cells of a piece, whose maxima go to VMEM."""

    def __init__(self, sweep: Sweep, piece: _Piece) -> None:
        halves = range(sweep.unit.schedule.halves)
        self._sweep, self._piece = sweep, piece
        self._squares = [Square(sweep.unit.schedule) for _ in halves]
        self._first = lax.div(jnp.int32(piece.start), sweep.unit.schedule.cell)
        self._numbers = [0 for _ in halves]  # of cells that are stored
        self._lanes = [jnp.full(SHAPE, -jnp.inf, jnp.float32) for _ in halves]

    def add(self, half: int, x: list[jax.Array], largest: jax.Array) -> None:
        """Takes a group."""
        self._squares[half].add(x, largest)
        if self._squares[half].is_full:
            self._store(half)

    def _store(self, half: int) -> None:
        sweep, maxima = self._sweep, self._squares[half].maxima()
        assert sweep.cells is not None
        self._lanes[half] = jnp.maximum(self._lanes[half], maxima[0])
        sweep.cells.store(self._first + self._numbers[half], half, maxima)
        self._numbers[half] += 1
        self._squares[half] = Square(sweep.unit.schedule)

    def end(self) -> None:
        """Stores what is not full, and the lanes' maxima."""
        sweep, schedule = self._sweep, self._sweep.unit.schedule
        if sweep.lane_maxima is None:
            return
        for half, square in enumerate(self._squares):
            if not square.is_empty:
                self._store(half)
        section = sweep.unit.section(lax.div(jnp.int32(self._piece.start), schedule.chunk))
        for half, vector in enumerate(self._lanes):
            at = section, half_of(half), slice(None)
            sweep.lane_maxima[at] = jnp.maximum(sweep.lane_maxima[at], vector)


def memory(schedule: Schedule) -> list[pl.MemoryRef]:
    """The memory that a sweep's maxima wait in."""
    shape = schedule.waiting, *SHAPE
    return [pltpu.VMEM(shape, jnp.float32), pltpu.VMEM(shape, jnp.float32)]
