"""One read of rows that are sampled: their groups' sums, and the largest of their logits.

`group_sums` says what a group's sum is. Beside it, a row that is to be cut (top-k, top-p, min-p)
needs candidates, and raw logprobs need the top K and the sums at temperature 1: the same read
gives them all, and each block of rows pays for what its rows need.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends.groups import (
    FEW,
    FIRST,
    MANY,
    GroupSums,
    ListedRows,
    Needed,
    Read,
    RowPart,
    Top,
    as_many_as_needed,
    columns_of_groups,
    whole_groups,
)
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.backends.xla import block_rows, group_sums, selection
from pallas_kernels.backends.xla.group_sums import EIGHT
from pallas_kernels.backends.xla.selection import from_groups_on_cpu
from pallas_kernels.backends.xla.tails import tail_of
from pallas_kernels.contract.changes import Changes, apply, apply_at
from pallas_kernels.contract.changes import of_rows as changes_of_rows
from pallas_kernels.lowering import forms, typed
from pallas_kernels.lowering.forms import Tree, vary_like
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.lowering.row_pieces import number_where
from pallas_kernels.numbers.ordered_keys import as_integers, strictly_larger

# Rows of a list that may be short, at a time: the work follows its length, and rows are copied. On
# a CPU, one row by itself takes half the time of a block of four.
LISTED_ON_CPU, LISTED = 4, 32
FEW_TARGETS = 32  # of so many, seldom more than one is on a list
_MORE_THAN_ROUNDING = 1.001  # of a sum of weights


# How many rows of logits to work on at a time: `block_rows.rows_on_cpu` and its like.
Size = Callable[[jax.Array, int, int, bool], int]
_Result = TypeVar("_Result", bound=Tree)  # of arrays [R, ...]


def read_part(
    part: RowPart,
    k: int,
    inverse: Float32[Array, " N"],
    needed: Needed,
    changes: Changes | None = None,
) -> tuple[Read, ...]:
    """Read all rows as they are changed and, with k, as they are: of each block both.

    Args:
      part: the logits; where there are changes, of whole rows, whose tail is changed already.
      k: static; the top k of every row and the sums at temperature 1 are wanted too, but no such
        sums of changed rows. -1: neither.
      inverse: `inverse_temperature` of each row.
      needed: of each row.
      changes: of the logits. None: one read of these.
    """
    own_too = changes is not None and k >= 0

    def like(part: RowPart, *_: Tree) -> tuple[Read, ...]:
        rows = part.logits.shape[0]
        zeros = jnp.zeros((rows, whole_groups(part) + part.tail.shape[1]), jnp.float32)
        shape = rows, min(max(k, MANY), part.logits.shape[1])
        missing = jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)
        raw_sums, number = zeros if k >= 0 else zeros[:, :0], jnp.zeros(rows, jnp.int32)
        unchanged = Read(GroupSums(zeros, zeros), raw_sums, *missing, number)
        return (unchanged._replace(raw_sums=zeros[:, :0]), unchanged) if own_too else (unchanged,)

    def read_on(
        size: Size, part: RowPart, inverse: jax.Array, needed: Needed, changes: Changes | None
    ) -> tuple[Read, ...]:
        def work(
            x: jax.Array,
            unchanged_x: jax.Array,
            tail: jax.Array,
            inverse: jax.Array,
            *numbers: jax.Array,
        ) -> tuple[Read, ...]:
            needed = Needed(*numbers)
            changed = _of_block(RowPart(x, tail, part.offset), inverse, needed, k, raw=not own_too)
            if not own_too:
                return (changed,)
            unchanged = RowPart(unchanged_x, tail_of(unchanged_x), part.offset)
            # It decides nothing.
            none = Needed.all_of(jnp.zeros_like(needed.number))
            return changed, _of_block(unchanged, inverse, none, k, raw=True)

        most = min(max(k, MANY), part.logits.shape[1])
        rows = ListedRows(part.logits, changes=changes)
        return _in_blocks(work, size, rows, (part.tail, inverse, *needed), like(part), most)

    cpu, tpu, default = (
        functools.partial(read_on, size)
        for size in (block_rows.rows_on_cpu, block_rows.rows_on_tpu, block_rows.rows_on_gpu)
    )
    return lowered_for(part, inverse, needed, changes, like=like, cpu=cpu, tpu=tpu, default=default)


def _of_block(part: RowPart, inverse: jax.Array, needed: Needed, k: int, *, raw: bool) -> Read:
    """`read_part` of a block of rows; raw: whether the sums at temperature 1 are wanted with k."""
    x = part.logits
    eights = forms.barrier(selection.group_maxima(x, EIGHT))
    group_eights = eights if part.tail.shape[1] < 2 else None
    groups = group_sums.of_block(columns_of_groups(part), part.tail, inverse, group_eights)
    groups = groups._replace(sums=prevent_recompute(groups.sums))
    raw_sums = jnp.zeros((x.shape[0], 0), jnp.float32)
    if k >= 0 and raw:
        once = jnp.ones_like(inverse)
        raw_sums = lax.cond(
            jnp.all(inverse == 1),
            lambda: groups.sums,
            # Its own columns: what a branch is given is copied, a slice too.
            lambda: (
                group_sums.of_block(columns_of_groups(part), part.tail, once, group_eights).sums
            ),
        )
    top = functools.partial(largest, x, eights)
    candidates, number = _as_many_as_do(x, groups, inverse, needed, k, top)
    return Read(groups, raw_sums, *candidates, number)


def _as_many_as_do(
    x: jax.Array,
    groups: GroupSums,
    inverse: jax.Array,
    needed: Needed,
    k: int,
    top: Callable[[int], Top],
) -> tuple[Top, jax.Array]:
    """The candidates of a block of rows [B, V], and how many of each row's decide.

    The first few are looked for before more, and often do: it is their weight that tells, less the
    last one's, which shows that no more are kept. Or it tells that no candidates have the share:
    then the row's cut is searched for, and none but the first few are worth their time.
    """
    rows, least = x.shape[0], max(k, FIRST)
    if least >= min(MANY, x.shape[1]):
        return as_many_as_needed(x, needed.number, k, top), needed.number
    may_do = (needed.number > 0) & (needed.share <= 1)
    is_tried = jnp.max(jnp.where(may_do, least, needed.number)) <= least
    if k < least:
        is_tried &= jnp.any(needed.number > k)
    missing = Top(
        jnp.full((rows, least), -1, jnp.int32), jnp.full((rows, least), -jnp.inf, jnp.float32)
    )
    # Branches side by side: one in another would have a copy of the logits.
    first = typed.cond(is_tried, lambda: top(least), lambda: vary_like(missing, x))

    def weighed() -> tuple[jax.Array, jax.Array]:
        largest_of_row = groups.maxima.max(axis=1, keepdims=True)
        tokens, of_groups = (
            sums * jnp.exp(scaled(logits, largest_of_row, inverse[:, None]))
            for sums, logits in ((jnp.float32(1), first.logits), (groups.sums, groups.maxima))
        )
        weight, total = tokens[:, :-1].sum(axis=1), of_groups.sum(axis=1)
        # Others weigh no more than the last, and 128 of them lie in as many groups at most, whose
        # weight is no more than theirs beyond any number and 128 times that.
        even = (total - weight) / of_groups.shape[1]
        in_groups = MANY * even + jnp.maximum(of_groups - even[:, None], 0).sum(axis=1)
        most = jnp.minimum(weight + (MANY + 1 - least) * tokens[:, -1], in_groups)
        share = needed.share * total
        do, none_do = weight >= share * _MORE_THAN_ROUNDING, most * _MORE_THAN_ROUNDING < share
        return may_do & do, may_do & needed.by_share & none_do

    unknown = vary_like(may_do & False, (first, groups, inverse))
    do, none_do = typed.cond(is_tried & jnp.any(may_do), weighed, lambda: (unknown, unknown))
    number = jnp.where(do | none_do, least, needed.number)

    def top_of(count: int) -> Top:
        return first if count == least else top(count)

    return as_many_as_needed(x, number, k, top_of, (least, FEW, MANY)), number


def largest(x: jax.Array, eights: jax.Array | None, k: int) -> Top:
    """The k largest of a block of rows [B, V], from the keys of the largest of eight each."""
    width = selection.group_width(x.shape[1], k)
    maxima = None
    if width is not None:
        if eights is None:
            eights = forms.barrier(selection.group_maxima(x, EIGHT))
        maxima = selection.wider(eights, width // EIGHT)
    return Top(*selection.select_top_k(x, maxima, k, width, from_groups_on_cpu))


def candidates(rows: ListedRows, k: int) -> Top:
    """The k largest logits of rows of a list; see `read.candidates`."""

    def like(rows: ListedRows) -> Top:
        assert rows.row_ids is not None
        shape = rows.row_ids.shape[0], k
        return Top(jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))

    def found_on(size: Size, rows: ListedRows) -> Top:
        def work(x: jax.Array, _: jax.Array) -> Top:
            return largest(x, None, k)

        return _in_blocks(work, size, rows, (), like(rows), k)

    cpu, default = (
        functools.partial(found_on, x) for x in (block_rows.rows_on_cpu, block_rows.rows_on_gpu)
    )
    return lowered_for(rows, like=like, cpu=cpu, default=default)


def larger_than_tokens(
    logits: Float[Array, "N V"], token_ids: Int32[Array, " N"], changes: Changes | None = None
) -> Int32[Array, " N"]:
    """How many logits of each row are strictly larger than its token's; 0 where an id is -1."""
    columns = jnp.clip(token_ids, 0, logits.shape[1] - 1)[:, None]
    x = jnp.take_along_axis(logits, columns, axis=1).astype(jnp.float32)
    return larger_than(logits, apply_at(x, columns, changes)[:, 0], token_ids >= 0, changes)


def larger_than(
    logits: Float[Array, "N C"],
    x: Float32[Array, " N"],
    there: Bool[Array, " N"],
    changes: Changes | None = None,
) -> Int32[Array, " N"]:
    """How many of these columns of each row are strictly larger than x; 0 where `there` is not.

    changes: of these columns.
    """
    index, number = forms.compacted(there)
    listed = ListedRows(logits, index, number, changes), x[index]

    def like(_: ListedRows, than: jax.Array) -> jax.Array:
        return jnp.zeros(than.shape, jnp.int32)

    counted = lowered_for(*listed, like=like, cpu=_num_larger_on_cpu, default=_num_larger)
    return forms.scattered(jnp.zeros_like(counted), counted, index, number)


def _num_larger(rows: ListedRows, than: jax.Array) -> jax.Array:
    """How many logits of each row of the list are strictly larger than `than` [R]."""

    def work(x: jax.Array, _: jax.Array, than: jax.Array) -> jax.Array:
        return strictly_larger(x, than[:, None].astype(x.dtype)).sum(axis=1, dtype=jnp.int32)

    initial = jnp.zeros(than.shape, jnp.int32)
    return _in_blocks(work, block_rows.rows_on_gpu, rows, (than,), initial, 0)


def _num_larger_on_cpu(rows: ListedRows, than: jax.Array) -> jax.Array:
    """`_num_larger`, row by row."""
    row_ids, changes = rows.row_ids, rows.changes
    assert row_ids is not None
    block = 1 if than.shape[0] <= FEW_TARGETS else LISTED_ON_CPU

    def work(start: jax.Array) -> jax.Array:
        listed_ids, least = forms.rows_from((row_ids, than), start, block)
        logits = forms.pin_to_iteration(rows.logits, start)

        def number(i: int) -> jax.Array:
            row = listed_ids[i : i + 1]
            x = _row_on_cpu(logits, row[0])[None]
            if changes is not None:
                x = apply(x, changes_of_rows(changes, row))
            limit = least[i : i + 1, None].astype(x.dtype)
            return number_where(lambda x: strictly_larger(x, limit), x, -jnp.inf)

        return jnp.concatenate([number(i) for i in range(block)])

    initial = jnp.zeros(than.shape, jnp.int32)
    return forms.map_blocks(work, block, rows.num_rows, initial, (rows, than))


def _row_on_cpu(logits: Float[Array, "N V"], row: jax.Array) -> Float[Array, " V"]:
    """One row of the logits, in the form that costs XLA's CPU programs least."""
    if logits.dtype.itemsize == 4:  # of a plain slice the compiler knows that it reads little
        return lax.dynamic_slice_in_dim(logits, row, 1)[0]
    # As integers: a slice of bfloat16 would be widened and rounded again.
    bits = lax.dynamic_slice_in_dim(as_integers(logits), row, 1)[0]
    return lax.bitcast_convert_type(bits, logits.dtype)


def _in_blocks(
    work: Callable[..., _Result],
    size: Size,
    rows: ListedRows,
    by_row: tuple[jax.Array, ...],
    initial: _Result,
    k: int,
) -> _Result:
    """`work(x [B, V], x, *given)` of blocks of rows, put together; see `forms.map_blocks`.

    The first x is the changed one, a copy of a block.
    """
    logits, row_ids, num_rows, changes = rows
    num_targets = jax.tree.leaves(initial)[0].shape[0]
    block = size(logits, num_targets, k, num_rows is not None or changes is not None)
    if num_rows is not None and isinstance(block, int):  # a symbolic number of rows is one block
        listed = 1 if num_targets <= FEW_TARGETS else LISTED_ON_CPU
        block = min(block, listed if size is block_rows.rows_on_cpu else LISTED)

    def changed(x: jax.Array, row_changes: Changes | None, *values: jax.Array) -> _Result:
        return work(x if row_changes is None else forms.barrier(apply(x, row_changes)), x, *values)

    def done_from(start: jax.Array) -> _Result:
        x = forms.block_of_logits(logits, row_ids, start, block)
        chosen, values = forms.rows_from((row_ids, by_row), start, block)
        if chosen is None:
            row_changes = forms.rows_from(changes, start, block)
        else:
            row_changes = changes_of_rows(changes, chosen)
        # A branch is where XLA copies the block: without, it is read number by number.
        return forms.in_branch(start >= 0, changed, x, row_changes, *values)

    return forms.map_blocks(done_from, block, num_rows, initial, (logits, changes, *by_row))
