"""The definition of `topk_logprobs` in plain `jax.numpy`, exact and with little scratch memory.

Rows are worked on in blocks, so temporaries are those of a block. Where there is more than one, a
loop's trip count follows `num_rows`. How many rows a block has, and how it is read, depends on the
platform that the program is lowered for (`Way`); `reductions.py` reads blocks on a GPU or TPU. On a
CPU, within a block:

1. The maxima of groups of eight logits, and of 256, and so each row's maximum.
2. The sums of groups of 256 (`group_sums`); for the entropy, also those of s exp(s).
3. The number of logits larger than the given token's.
4. Selection of the top K from the K groups with the largest maxima (`selection`).

`backends/row_totals.py` makes rows' sums of the groups', wherever these are, and
`backends/answers.py` logprobs and token ranks of them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.backends.groups import WIDTH, RowPart, columns_of_groups
from pallas_kernels.backends.row_totals import PartSums, as_part, inverse_of, joined, no_part
from pallas_kernels.backends.xla import group_sums, reductions, selection
from pallas_kernels.backends.xla.block_rows import (
    few_in_one_thread,
    in_one_thread,
    is_one_loop,
    rows_on_cpu,
    rows_on_gpu,
    rows_on_tpu,
)
from pallas_kernels.backends.xla.tails import tail_of, with_following
from pallas_kernels.contract.changes import apply
from pallas_kernels.contract.rows import Outputs, Rows, RowSums, no_sums
from pallas_kernels.lowering import forms, row_pieces
from pallas_kernels.lowering.forms import Tree
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.numbers import ordered_keys

_Result = TypeVar("_Result", bound=Tree)


def _num_larger(x: jax.Array, limit: jax.Array) -> jax.Array:
    """How many logits of each row of x [B, V] are larger than `limit` [B]: [B] int32."""
    with jax.named_scope("row_ranks"):
        turn, than = forms.barrier(ordered_keys.turned(limit))

        def is_larger(piece: jax.Array) -> jax.Array:
            return (ordered_keys.as_integers(piece) ^ turn[:, None]) > than[:, None]

        return row_pieces.number_where(is_larger, x, -jnp.inf)


class Way(NamedTuple):
    """How a kind of platform reads rows."""

    block_rows: Callable[..., int]  # see `rows_on_cpu`
    sums: Callable[[jax.Array, jax.Array, Outputs, jax.Array | None], RowSums] | None = None
    # None: by groups


CPU = Way(rows_on_cpu)
GPU = Way(rows_on_gpu, reductions.sums_on_gpu)
TPU = Way(rows_on_tpu, reductions.sums_on_tpu)
WAYS = {"cpu": CPU, "tpu": TPU, "default": GPU}


def row_sums(rows: Rows, selected: jax.Array, outputs: Outputs) -> RowSums:
    """What is left of rows of logits [N, V].

    Args:
      rows: temperatures are usable ones, changes `prepared`.
      selected: [R] float32, the given token's changed logit.
      outputs: what is wanted of them.

    Returns:
      The sums; those of rows that are skipped are unspecified.
    """

    def like(_: Rows, selected: jax.Array) -> RowSums:
        return no_sums(selected.shape[0], outputs)

    run = {name: functools.partial(_row_sums, way, outputs) for name, way in WAYS.items()}
    return lowered_for(rows, selected, like=like, **run)


def part_sums(
    rows: Rows, following: jax.Array | None, offset: jax.Array, selected: jax.Array,
    outputs: Outputs,
) -> PartSums:  # fmt: skip
    """What is left of the columns of rows [N, C] that a shard of the vocabulary has.

    Args:
      rows: changes are those of these columns.
      following: [R, 255], the changed columns of each target row that the next shard begins with;
        None where all groups end where columns do.
      offset: [] int32, the column where this shard's first group begins.
      selected: as for `row_sums`; the token may be another shard's.
      outputs: what is wanted; k is at most C.
    """

    def like(rows: Rows, following: Tree, offset: jax.Array, selected: jax.Array) -> PartSums:
        return no_part(selected.shape[0], groups_of_part(rows.logits.shape[1], following), outputs)

    run = {name: functools.partial(_part_sums, way, outputs) for name, way in WAYS.items()}
    return lowered_for(rows, following, offset, selected, like=like, **run)


def groups_of_part(width: int, following: Tree) -> int:
    """How many groups a shard of so many columns may have."""
    return width // WIDTH if following is None else width // WIDTH + 1


def _row_sums(way: Way, outputs: Outputs, rows: Rows, selected: jax.Array) -> RowSums:
    def work(x: jax.Array, targets: Targets) -> RowSums:
        return sums_of_block(way, x, targets.selected, outputs, targets.temperatures)

    return in_blocks(way, work, rows, selected, None, no_sums(selected.shape[0], outputs), outputs)


def _part_sums(
    way: Way, outputs: Outputs, rows: Rows, following: jax.Array | None, offset: jax.Array,
    selected: jax.Array,
) -> PartSums:  # fmt: skip
    def work(x: jax.Array, targets: Targets) -> PartSums:
        if way.sums is not None:
            return as_part(way.sums(x, targets.selected, outputs, targets.temperatures), number)
        part = RowPart(x, tail_of(x), jnp.zeros_like(offset))
        if targets.following is not None:
            part = with_following(x, targets.following, offset)
        return sums_of_part(part, targets.selected, outputs, targets.temperatures)

    number = groups_of_part(rows.logits.shape[1], following)
    initial = no_part(selected.shape[0], number, outputs)
    return in_blocks(way, work, rows, selected, following, initial, outputs)


class Targets(NamedTuple):
    """What is known of each target row of a block."""

    selected: jax.Array
    temperatures: jax.Array | None
    following: jax.Array | None


def in_blocks(
    way: Way,
    work: Callable[[jax.Array, Targets], _Result],
    rows: Rows,
    selected: jax.Array,
    following: jax.Array | None,
    initial: _Result,
    outputs: Outputs,
) -> _Result:
    """`work` of blocks of the target rows, as they are changed, put together."""
    num_targets = selected.shape[0]
    # A changed block is a copy.
    small = rows.num_rows is not None or rows.changes is not None
    block = way.block_rows(rows.logits, num_targets, outputs.k, small)

    def of_block(start: jax.Array) -> _Result:
        of_rows = rows.changes, Targets(selected, rows.temperatures, following)
        changes, targets = forms.rows_from(of_rows, start, block)
        x = forms.block_of_logits(rows.logits, rows.row_ids, start, block)
        if changes is not None:  # a copy, which is made once
            x = forms.barrier(apply(x, changes))
        if way is CPU and selection.is_small_batch(x):
            return in_one_thread(work, x, targets)
        if way is CPU and block != num_targets:
            # A branch is where XLA copies the block: without, it is read number by number.
            return forms.in_branch(start >= 0, work, x, targets)
        return work(x, targets)

    arrays = rows, selected, following
    return forms.map_blocks(of_block, block, rows.num_rows, initial, arrays)


def sums_of_block(
    way: Way, x: jax.Array, selected: jax.Array, outputs: Outputs, temperatures: jax.Array | None
) -> RowSums:
    """The sums of a block of whole rows x [B, V]; selected [B] is the given token's logit."""
    if way.sums is not None:
        return way.sums(x, selected, outputs, temperatures)
    part = sums_of_part(RowPart(x, tail_of(x), jnp.int32(0)), selected, outputs, temperatures)
    return joined(part, inverse_of(temperatures, x.shape[0]), outputs.k, x.shape[1])


def sums_of_part(
    part: RowPart, selected: jax.Array, outputs: Outputs, temperatures: jax.Array | None
) -> PartSums:
    """Steps 1 to 4 of a block [B, C] of a part of rows."""
    x, k = part.logits, outputs.k
    eights = None
    if k:  # else maxima of groups of 256 alone are needed, and XLA would join the two steps
        eights = forms.barrier(selection.group_maxima(x, selection.NARROWEST_GROUP))
    groups = few_in_one_thread(
        x,
        functools.partial(group_sums.of_block, weighted=outputs.entropy, one_loop=is_one_loop(x)),
        columns_of_groups(part),
        part.tail,
        inverse_of(temperatures, x.shape[0]),
        eights if part.tail.shape[1] < 2 else None,
    )
    limit = ordered_keys.limit_of_count(selected.astype(x.dtype), outputs.inclusive)
    width, maxima = selection.group_width(x.shape[1], k), None
    if width is not None and eights is not None:
        maxima = selection.wider(eights, width // selection.NARROWEST_GROUP)
    top = selection.select_top_k(x, maxima, k, width, selection.from_groups_on_cpu)
    return PartSums(groups, few_in_one_thread(x, _num_larger, x, limit), *top)
