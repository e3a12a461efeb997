"""The definition of `topk_logprobs` in plain `jax.numpy`, exact and with little scratch memory.

Rows are worked on in blocks, so temporaries are those of a block. Where there is more than one, a
loop's trip count follows `num_rows`. How many rows a block has, and how it is read, depends on the
platform that the program is lowered for (`blocks`). Within a block:

1. The maxima of contiguous groups of logits, and so each row's maximum.
2. Row statistics: the sum of exponentials, the number of strictly larger logits.
3. Selection of the top K from the K groups with the largest maxima.
4. Finish: logprobs, token ranks and the answers for invalid and skipped rows.

Each step is a function of its own, so that vocabulary shards can run steps 1 to 3 on their part and
combine the compact results before step 4.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.backends.xla import block_sizes, row_entropy, row_statistics, selection
from pallas_kernels.backends.xla.block_sizes import in_one_thread, is_small_batch
from pallas_kernels.backends.xla.on_cpu.selection_on_cpu import (
    from_groups_on_cpu,
    largest_on_cpu,
    row_maximum_on_cpu,
)
from pallas_kernels.backends.xla.row_statistics import Given
from pallas_kernels.contract.changes import Changes, apply
from pallas_kernels.contract.types import Outputs, Rows, RowSums
from pallas_kernels.lowering import blocks
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.numbers.ordered_keys import limit_of_count


class Way(NamedTuple):
    """How a kind of platform reads rows."""

    block_rows: Callable[..., int]  # see `blocks`
    groups: bool  # whether the selection has two stages, see `selection`
    first_width: int | None  # of the groups of the first reduction; None: those of the selection
    row_maximum: Callable[[jax.Array], jax.Array]  # of rows of logits, where no group is needed
    largest: Callable[[jax.Array, DTypeLike], jax.Array]  # of rows of group maxima
    sums: Callable[[jax.Array, Given], tuple[jax.Array, jax.Array]]
    weighted_sum: Callable[[jax.Array, Given], jax.Array]  # for the entropy
    two_stages: selection.TwoStages


CPU = Way(
    block_sizes.rows_on_cpu,
    groups=True,
    first_width=selection.NARROWEST_GROUP,
    row_maximum=row_maximum_on_cpu,
    largest=largest_on_cpu,
    sums=row_statistics.sums_on_cpu,
    weighted_sum=row_entropy.weighted_sum_on_cpu,
    two_stages=from_groups_on_cpu,
)
GPU = Way(
    block_sizes.rows_on_gpu,
    groups=True,
    first_width=None,
    row_maximum=selection.row_maximum,
    largest=selection.largest,
    sums=row_statistics.sums,
    weighted_sum=row_entropy.weighted_sum,
    two_stages=selection.from_groups,
)
# A TPU reads chosen groups one after the other, in a loop of R * K trips.
TPU = GPU._replace(
    block_rows=block_sizes.rows_on_tpu, groups=False, sums=row_statistics.sums_on_tpu
)
Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]  # the first and last of `RowSums`
WAYS = {"cpu": CPU, "tpu": TPU, "default": GPU}


def row_sums(rows: Rows, selected: jax.Array, outputs: Outputs) -> RowSums:
    """What is left of rows of logits [N, V], which may be a part of longer ones.

    Args:
      rows: temperatures are usable ones, changes `prepared` and of this part.
      selected: [R] float32, the given token's changed logit, which may be in another part.
      outputs: what is wanted of them.

    Returns:
      The sums; those of rows that are skipped are unspecified.
    """
    run = {name: functools.partial(_row_sums, way, outputs) for name, way in WAYS.items()}
    return lowered_for(rows, selected, like=functools.partial(_like, outputs), **run)


def _like(outputs: Outputs, rows: Rows, selected: jax.Array) -> RowSums:
    """Results of the shapes and dtypes of `row_sums`."""
    zeros = jnp.zeros(selected.shape[0], jnp.float32)
    return RowSums(
        maximum=zeros,
        sum_exp=zeros,
        num_larger=zeros.astype(jnp.int32),
        top_ids=jnp.zeros((selected.shape[0], outputs.k), jnp.int32),
        top_logits=jnp.zeros((selected.shape[0], outputs.k), jnp.float32),
        weighted=zeros if outputs.entropy else None,
    )


def _row_sums(way: Way, outputs: Outputs, rows: Rows, selected: jax.Array) -> RowSums:
    num_targets = selected.shape[0]
    # A changed block is a copy.
    small = rows.num_rows is not None or rows.changes is not None
    block = way.block_rows(rows.logits, num_targets, outputs.k, small)

    def work(start: jax.Array) -> RowSums:
        def part(x: jax.Array) -> jax.Array:
            return x if block == num_targets else lax.dynamic_slice_in_dim(x, start, block)

        x = block_of_rows(rows.logits, rows.row_ids, start, block, num_targets)
        x = changed_block(x, jax.tree.map(part, rows.changes))
        temperature = None if rows.temperatures is None else part(rows.temperatures)
        return _read(way, x, part(selected).astype(x.dtype), outputs, temperature)

    initial = _like(outputs, rows, selected)
    return blocks.map_blocks(work, block, rows.num_rows, initial, (rows, selected))


def _read(
    way: Way,
    x: jax.Array,
    selected: jax.Array,
    outputs: Outputs,
    temperatures: jax.Array | None,
) -> RowSums:
    """Steps 1 to 3 of a block x [B, V]; selected is [B] of x's dtype.

    x may be a part of longer rows: a row of it that has -inf alone gives a sum of 0.
    """
    k = outputs.k
    width = selection.group_width(x.shape[1], k) if way.groups else None

    def statistics_and_maxima(
        x: jax.Array, selected: jax.Array, temperatures: jax.Array | None
    ) -> tuple[Sums, jax.Array | None]:
        selected = selected.astype(x.dtype)
        maximum, maxima = _maxima(way, x, width)
        reference = jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)
        limit = limit_of_count(selected, outputs.inclusive)
        given = Given(reference, limit, temperatures)
        weighted = way.weighted_sum(x, given) if outputs.entropy else None
        return (maximum, *way.sums(x, given), weighted), maxima

    if way is CPU and is_small_batch(x):
        wide = selected.astype(jnp.float32)  # one operation fewer out here
        statistics, maxima = in_one_thread(statistics_and_maxima, x, wide, temperatures)
    else:
        statistics, maxima = statistics_and_maxima(x, selected, temperatures)
    maximum, sum_exp, num_larger, weighted = statistics
    top = selection.select_top_k(x, maxima, k, width, way.two_stages)
    return RowSums(maximum, sum_exp, num_larger, *top, weighted)


def _maxima(way: Way, x: jax.Array, width: int | None) -> tuple[jax.Array, jax.Array | None]:
    """The largest logit [B] float32 of each row, and its groups' keys if there is a width."""
    if width is None:
        return way.row_maximum(x), None
    first = way.first_width or width
    maxima = blocks.barrier(selection.group_maxima(x, first))  # else they are computed twice
    maxima = selection.wider(maxima, width // first)
    return way.largest(maxima, x.dtype), maxima


def block_of_rows(
    logits: jax.Array, row_ids: jax.Array | None, start: jax.Array, block: int, num_targets: int
) -> jax.Array:
    """The logits [B, V] of target rows start .. start + B - 1, in their own dtype."""
    if row_ids is None:
        if block == num_targets:
            return logits
        return lax.dynamic_slice_in_dim(blocks.pin_to_iteration(logits, start), start, block)
    rows = lax.dynamic_slice_in_dim(row_ids, start, block)
    copied: jax.Array = blocks.barrier(gather_rows(blocks.pin_to_iteration(logits, start), rows))
    return copied


def changed_block(x: jax.Array, changes: Changes | None) -> jax.Array:
    """The changed logits of a block x [B, V]: a copy, which is made once."""
    if changes is None:
        return x
    copied: jax.Array = blocks.barrier(apply(x, changes))
    return copied


def gather_rows(logits: jax.Array, rows: jax.Array) -> jax.Array:
    """logits [N, V], rows [B] -> [B, V]; a row outside the logits is clamped (masked by finish)."""
    if rows.shape[0] == 1:  # a plain slice: XLA copies it at memory speed on every platform
        return lax.dynamic_slice_in_dim(logits, rows[0], 1)
    return logits.at[rows].get(mode="clip")
