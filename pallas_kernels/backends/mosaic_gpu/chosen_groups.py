"""Groups of a row that a kernel reads again, because something of their tokens is wanted.

The row was read before, in fixed groups of 256 logits, and their maxima and sums say which of them
still matter. A kernel holds a flag for each group. The flagged ones are written to a list, in no
order, and a warpgroup reads a block's number of them at a time, as pass 1 reads a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.groups import WIDTH
from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.changes.row_changes import RowChanges, changed
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.schedule import (
    GROUPS_PER_BLOCK,
    RUN,
    WARPGROUP,
    Index,
    Layout,
    Schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, Word, word

_Carry = TypeVar("_Carry")  # of a loop: a tree of vectors and numbers
NO_GROUP = 2**31 - 1


class Row(NamedTuple):
    """A row of logits as a kernel reads it again."""

    schedule: Schedule
    logits_ref: Readable  # [N * V]
    first: Index  # where the row starts
    changes: RowChanges = None  # of several rows: what is read is changed
    number: Index = 0  # which of these

    @property
    def vector(self) -> int:
        """The logits that a thread can load at once wherever a row begins."""
        return self.schedule.common_vector(self.schedule.vocabulary)

    @property
    def layout(self) -> Layout:
        """Registers of a piece: of the same 64 logits of each group of a block's number of them."""
        return self.schedule.layout(self.vector)

    def pieces(self, groups: jax.Array) -> list[jax.Array]:
        """The logits of these groups, each piece [groups, 64]; -inf beyond the row or without one.

        groups: `Chosen.groups`.
        """
        shape, vocabulary, vector = self.schedule.piece, self.schedule.vocabulary, self.vector
        starts = range(0, WIDTH, shape[1])
        layout = self.layout

        def body(logits: Value, first: Vector, groups: Vector) -> tuple[Vector, ...]:
            (group,) = thread.words(groups)
            column = (thread.thread() & (shape[1] // RUN - 1)) * RUN
            begin = thread.larger(group, 0) * WIDTH + column
            start, there = word(first), group >= 0
            runs = [
                thread.load_run_within(logits, start, begin + i, there, vocabulary, vector, RUN)
                for i in starts
            ]
            return tuple(thread.vector_of(run, layout, shape) for run in runs)

        kind = thread.result(shape, self.logits_ref.dtype, layout)
        arguments = self.logits_ref, self.first, groups
        layouts = None, "scalar", layout.reduce(1)
        pieces = list(thread.inline(body, arguments, layouts, (kind,) * len(starts)))
        return self._changed(pieces, lambda: self.ids(groups)[0], layout)

    def _changed(
        self, pieces: list[jax.Array], ids: Callable[[], jax.Array], layout: Layout
    ) -> list[jax.Array]:
        if self.changes is None:
            return pieces
        return changed(pieces, ids(), self.changes, self.number, self.schedule, layout)

    def ids(self, groups: jax.Array) -> list[jax.Array]:
        """The token ids of `pieces`, int32; below 0 where there is no group."""
        shape = self.schedule.piece
        first = compat.cast(lax.broadcast_in_dim(groups * WIDTH, shape, (0,)), self.layout)
        column = compat.iota(shape, 1, self.layout)
        return [first + (column + i) for i in range(0, WIDTH, shape[1])]

    def group(self, number: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One group's logits [256] float32, their ids and the first id of these.

        A last group that is cut off begins earlier, within the row.
        Ids below 256 * `number` are those of the group before.
        """
        begin = jnp.minimum(number * WIDTH, self.schedule.vocabulary - WIDTH)
        x = compat.load_vector(self.logits_ref, self.first + begin, WIDTH).astype(jnp.float32)
        ids = compat.vector_iota(WIDTH) + begin
        (x,) = self._changed([x], lambda: ids, compat.vector_layout())
        return x, ids, begin


def padded_size(number: int) -> int:
    """The length of a vector of so many groups: whole warpgroups."""
    return -(-number // WARPGROUP) * WARPGROUP


def load_groups(ref: Readable, row: Index, number: int, otherwise: float) -> jax.Array:
    """A row of [R * number] float32 as a vector of `padded_size`; `otherwise` from there on."""
    size, start = padded_size(number), row * number
    layout = compat.vector_layout()

    def body(here: Value, first: Vector) -> Vector:
        registers = []
        for i in range(0, size, WARPGROUP):
            place = thread.thread() + i
            at = word(first) + thread.smaller(place, number - 1)
            registers.append(thread.load_or(here, at, 1, place < number, otherwise))
        return thread.vector_of(registers, layout, (size,))

    kind = thread.result((size,), jnp.float32, layout)
    return compat.asarray(thread.inline(body, (ref, start), (None, "scalar"), kind))


def scratch_types(number: int) -> tuple[Any, ...]:
    """The types of `Chosen`'s references, for so many groups."""
    size = max(padded_size(number), WIDTH)
    return GPU.SMEM((size,), jnp.int32), GPU.SMEM((size,), jnp.int32), GPU.SMEM((4,), jnp.int32)


class Chosen(NamedTuple):
    """The list of chosen groups: references to shared memory."""

    list_ref: jax.Ref  # [padded groups] i32
    places_ref: jax.Ref  # [padded groups] i32: of each group in the list; -1 of others
    counter_ref: jax.Ref  # [4] i32

    def choose(self, flags: jax.Array) -> jax.Array:
        """Make the list of flagged groups; returns how many they are.

        flags: [padded_size] bool, in a `compat.vector_layout`.
        """
        flagged = jnp.where(flags, jnp.int32(1), jnp.int32(0))

        def body(given: Vector, chosen: Value, places: Value, counter: Value) -> Vector:
            me, mine = thread.thread(), thread.words(given)
            thread.when(me == 0, lambda: thread.store(counter, 0, 0))
            thread.sync_threads()
            for i, flag in enumerate(mine):
                group = me + i * WARPGROUP
                thread.store(places, group, self._listed(flag, group, chosen, counter))
            thread.sync_threads()
            return thread.scalar(word(thread.load(counter, 0)))

        kind = thread.result((), jnp.int32, GPU.Layout.WG_SPLAT)
        arguments = flagged, self.list_ref, self.places_ref, self.counter_ref
        layouts = compat.vector_layout(), None, None, None
        return compat.asarray(thread.inline(body, arguments, layouts, kind))

    @staticmethod
    def _listed(flag: Word, group: Word, chosen: Value, counter: Value) -> Word:
        """The place of a group in the list, where it is written; -1 if it is not flagged."""

        def put() -> list[Word]:
            place = thread.add_atomically(counter, 0, 1)
            thread.store(chosen, place, group)
            return [place]

        (place,) = thread.when_else(flag != 0, put, [word(-1)])
        return place

    def groups(self, turn: Index, count: Index, row: Row) -> jax.Array:
        """The groups of a turn [a block's number] int32, in registers as `Row.layout`'s rows.

        -1 where the list ends.
        """
        size, shape = GROUPS_PER_BLOCK, row.schedule.piece
        layout = row.layout.reduce(1)
        lanes = (shape[1] // RUN).bit_length() - 1

        def body(chosen: Value, turn: Vector, count: Vector) -> Vector:
            place = word(turn) * size + (thread.thread() >> lanes)
            found = word(thread.load(chosen, thread.smaller(place, word(count) - 1)))
            value = thread.select(place < word(count), found, -1)
            return thread.one_each(value, layout, (size,), signed=True)

        kind = thread.result((size,), jnp.int32, layout)
        layouts = None, "scalar", "scalar"
        return compat.asarray(thread.inline(body, (self.list_ref, turn, count), layouts, kind))


def over_groups(
    row: Row,
    chosen: Chosen,
    flags: jax.Array,
    work: Callable[[Index, jax.Array, _Carry], _Carry],
    initial: _Carry,
) -> _Carry:
    """work(turn, groups, carry) -> carry, over the flagged groups in no order.

    flags: as `Chosen.choose` takes them.
    """
    count = chosen.choose(flags)
    size = GROUPS_PER_BLOCK

    def body(turn: Index, carry: _Carry) -> _Carry:
        return work(turn, chosen.groups(turn, count, row), carry)

    return lax.fori_loop(0, (count + (size - 1)) // size, body, initial)  # type: ignore[no-any-return]
