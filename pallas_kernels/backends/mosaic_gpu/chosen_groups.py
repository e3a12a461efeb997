"""Groups of a row that a kernel reads again, because something of their tokens is wanted.

The row was read before, in fixed groups of 256 logits, and their maxima and sums say which of them
still matter. A kernel holds a flag for each group. The flagged ones are written to a list, in no
order, and a warpgroup reads a block's number of them at a time, as pass 1 reads a block.

The groups that hold a token with a bias have a kernel of their own (`read_biased`): pass 1 would
take twice as long if it looked for biases. They are few, so it leaves out the tokens that have one,
and here the groups of these are summed in pass 1's order: with its bits, as if it had changed the
logits itself. A program takes a block's number of them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.groups import WIDTH, GroupSums
from pallas_kernels.backends.mosaic_gpu import compat, reading, thread
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.groups_kernel import maxima_of, sums_of
from pallas_kernels.backends.mosaic_gpu.reading import RowChanges, RowTargets, changed, flat_changes
from pallas_kernels.backends.mosaic_gpu.schedule import (
    GROUPS_PER_BLOCK,
    RUN,
    WARPGROUP,
    Index,
    Layout,
    Schedule,
    choose_read_schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, Word, word
from pallas_kernels.contract.rows import Rows

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


class Replaced(NamedTuple):
    """Groups of R rows that stand in the place of those that pass 1 has left, D of each row.

    Arrays outside a kernel, references inside.
    """

    numbers: jax.Array  # [R * D] i32, distinct ones of a row; -1 where there is none
    maxima: jax.Array  # [R * D] f32
    sums: jax.Array  # [R * D] f32
    weighted: jax.Array | None  # [R * D] f32


def read_biased(rows: Rows, *, weighted: bool) -> Replaced:
    """The groups that hold a token with a bias, as they are changed, at most one for each bias.

    Args:
      rows: with biases, whole; temperatures are usable ones, changes `prepared`.
      weighted: whether the sums for the entropy are wanted.
    """
    changes = rows.changes
    assert changes is not None
    assert changes.bias_token_ids is not None
    ids = changes.bias_token_ids
    # In order, with those that another place has; a group's last one stands for it.
    numbers = jnp.where(ids < -1, -2 - ids, ids) >> (WIDTH.bit_length() - 1)
    following = jnp.pad(numbers[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    numbers = jnp.where(numbers != following, numbers, -1)
    padding = -ids.shape[1] % GROUPS_PER_BLOCK
    numbers = jnp.pad(numbers, ((0, 0), (0, padding)), constant_values=-1)
    return Replaced(numbers.reshape(-1), *_read_numbers(numbers, rows, weighted=weighted))


def put_biased(groups: GroupSums, replaced: Replaced) -> GroupSums:
    """Groups [R, G] with those of `read_biased` in their places."""
    of_rows: Replaced = jax.tree.map(lambda x: x.reshape(groups.sums.shape[0], -1), replaced)
    numbers, maxima, sums, weighted = of_rows
    row = jnp.arange(len(numbers), dtype=jnp.int32)[:, None]
    places = jnp.where(numbers < 0, groups.sums.shape[1], numbers)  # behind the row: dropped
    return jax.tree.map(  # type: ignore[no-any-return]
        lambda x, y: x.at[row, places].set(y, mode="drop"),
        groups,
        GroupSums(maxima, sums, weighted),
    )


def _read_numbers(
    numbers: jax.Array, rows: Rows, *, weighted: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Maxima and sums [R * D] of the groups of these numbers [R, D]; -1 where there is none."""
    num_targets, count = numbers.shape
    num_rows, width = rows.logits.shape
    schedule = choose_read_schedule(num_targets, width, rows.logits.dtype.name)
    kernel = GPU.kernel(
        functools.partial(_biased_groups_kernel, schedule=schedule, num_rows=num_rows, count=count),
        out_type=[compat.shape((num_targets * count,), jnp.float32)] * (3 if weighted else 2),
        grid=(count // GROUPS_PER_BLOCK, num_targets),
        grid_names=("block", "row"),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="biased_groups",
    )
    targets = reading.make_targets(rows.row_ids, rows.num_rows, rows.temperatures)
    changes = flat_changes(rows.changes, width)
    found = kernel(rows.logits.reshape(-1), numbers.reshape(-1), targets, changes)
    maxima, sums, *by_exponent = found
    return maxima, sums, by_exponent[0] if weighted else None


def _biased_groups_kernel(
    logits_ref: jax.Ref,  # [N * V]  in
    numbers_ref: Readable,  # [R * D] i32  in
    targets: RowTargets,  # in
    changes: RowChanges,  # of the R rows  in
    maxima_ref: jax.Ref,  # [R * D] f32  out
    sums_ref: jax.Ref,  # [R * D] f32  out
    weighted_ref: jax.Ref | None = None,  # [R * D] f32  out
    *,
    schedule: Schedule,
    num_rows: int,
    count: int,
) -> None:
    target, block = lax.axis_index("row"), lax.axis_index("block")
    logits_row, _ = targets.row(target)
    inverse = reading.inverse_in_kernel(targets.temperature(target))
    first = jnp.clip(logits_row, 0, num_rows - 1) * schedule.vocabulary
    row = Row(schedule, logits_ref, first, changes, target)
    begin = target * count + block * GROUPS_PER_BLOCK
    pieces = row.pieces(_numbers(row, numbers_ref, begin))
    largest = maxima_of(pieces)
    (sums,), weighted = sums_of(
        pieces, largest, (reading.exponents_scale(inverse),), row.layout,
        weighted=weighted_ref is not None,
    )  # fmt: skip
    results = [(maxima_ref, largest.astype(jnp.float32)), (sums_ref, sums)]
    if weighted_ref is not None and weighted is not None:
        results.append((weighted_ref, weighted))
    for ref, values in results:
        compat.store_some(ref, begin, GROUPS_PER_BLOCK, values)


def _numbers(row: Row, numbers_ref: Readable, begin: jax.Array) -> jax.Array:
    """A block's number of group numbers [groups] from `begin` on, as `Row.pieces` takes them."""
    layout = row.layout.reduce(1)
    lanes = (row.schedule.piece[1] // RUN).bit_length() - 1

    def body(numbers: Value, begin: Vector) -> Vector:
        found = word(thread.load(numbers, word(begin) + (thread.thread() >> lanes)))
        return thread.one_each(found, layout, (GROUPS_PER_BLOCK,), signed=True)

    kind = thread.result((GROUPS_PER_BLOCK,), jnp.int32, layout)
    return thread.inline(body, (numbers_ref, begin), (None, "scalar"), kind)  # type: ignore[no-any-return]
