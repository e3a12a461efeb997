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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.backends.answers import (
    RowParts,
    RowStatistics,
    finish,
    skipped_rows,
    usable_temperatures,
    wanted_rows,
)
from pallas_kernels.backends.xla import row_entropy, row_statistics, selection
from pallas_kernels.backends.xla.few_rows import few_rows, in_one_thread
from pallas_kernels.backends.xla.on_cpu.selection_on_cpu import (
    from_groups_on_cpu,
    largest_on_cpu,
    row_maximum_on_cpu,
)
from pallas_kernels.backends.xla.row_statistics import Given
from pallas_kernels.contract.changes import Changes, apply, prepared
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.lowering import blocks
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.numbers.ordered_keys import just_below


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
    blocks.rows_on_cpu,
    groups=True,
    first_width=selection.NARROWEST_GROUP,
    row_maximum=row_maximum_on_cpu,
    largest=largest_on_cpu,
    sums=row_statistics.sums_on_cpu,
    weighted_sum=row_entropy.weighted_sum_on_cpu,
    two_stages=from_groups_on_cpu,
)
GPU = Way(
    blocks.rows_on_gpu,
    groups=True,
    first_width=None,
    row_maximum=selection.row_maximum,
    largest=selection.largest,
    sums=row_statistics.sums,
    weighted_sum=row_entropy.weighted_sum,
    two_stages=selection.from_groups,
)
# A TPU reads chosen groups one after the other, in a loop of R * K trips.
TPU = GPU._replace(block_rows=blocks.rows_on_tpu, groups=False, sums=row_statistics.sums_on_tpu)
WAYS = {"cpu": CPU, "tpu": TPU, "default": GPU}


def topk_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    wanted: Wanted,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
    changes: Changes | None = None,
) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` for checked arguments; extra_token_ids may be [R, 0]."""

    run = {name: functools.partial(_topk_logprobs, way, wanted) for name, way in WAYS.items()}
    arguments = (logits, token_ids, row_ids, num_rows, temperatures, extra_token_ids, changes)
    like = functools.partial(like_topk_logprobs, wanted)
    return lowered_for(*arguments, like=like, **run)


def row_parts(
    logits: jax.Array,
    selected: jax.Array,
    wanted: Wanted,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    changes: Changes | None = None,
) -> RowParts:
    """Steps 1 to 3 for R rows of logits [N, V], which may be a part of longer ones.

    selected [R] float32 is the given token's changed logit, which may be in another part;
    temperatures are usable ones, changes `prepared` and of this part. The rest is as
    `topk_logprobs`. Rows that are skipped hold anything.
    """

    run = {name: functools.partial(_row_parts, way, wanted) for name, way in WAYS.items()}
    like = functools.partial(like_row_parts, wanted)
    arguments = (logits, selected, row_ids, num_rows, temperatures, changes)
    return lowered_for(*arguments, like=like, **run)


def like_topk_logprobs(
    wanted: Wanted, logits: jax.Array, token_ids: jax.Array | None, *rest: Any
) -> TopkLogprobs:
    """Results of the shapes and dtypes of `topk_logprobs`; without token_ids: of the fused path."""
    targets = logits if token_ids is None else token_ids
    *_, extra_token_ids, _ = rest
    return skipped_rows(targets.shape[0], wanted, extra_token_ids.shape[1])


def like_row_parts(wanted: Wanted, logits: jax.Array, selected: jax.Array, *rest: Any) -> RowParts:
    """Results of the shapes and dtypes of `row_parts`."""
    zeros = jnp.zeros(selected.shape[0], jnp.float32)
    return RowParts(
        maximum=zeros,
        sum_exp=zeros,
        num_larger=zeros.astype(jnp.int32),
        top_ids=jnp.zeros((selected.shape[0], wanted.k), jnp.int32),
        top_logits=jnp.zeros((selected.shape[0], wanted.k), jnp.float32),
        weighted=zeros if wanted.entropy else None,
    )


def _topk_logprobs(
    way: Way,
    wanted: Wanted,
    logits: jax.Array,
    token_ids: jax.Array,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
    changes: Changes | None,
) -> TopkLogprobs:
    num_targets, vocab_size = token_ids.shape[0], logits.shape[1]
    small = num_rows is not None or changes is not None  # a changed block is a copy
    block = way.block_rows(logits, num_targets, wanted.k, small)
    rows = wanted_rows(logits.shape[0], num_targets, row_ids, num_rows)
    changes = prepared(changes, vocab_size)
    usable = None if temperatures is None else usable_temperatures(temperatures)

    def work(start: jax.Array) -> TopkLogprobs:
        """The outputs of target rows start .. start + block - 1."""

        def part(x: jax.Array) -> jax.Array:
            return x if block == num_targets else lax.dynamic_slice_in_dim(x, start, block)

        x = block_of_rows(logits, row_ids, start, block, num_targets)
        x = changed_block(x, jax.tree.map(part, changes))
        temperature = None if usable is None else part(usable)
        given, extra_ids = part(token_ids), part(extra_token_ids)
        selected = chosen_logits(x, given[:, None])
        extra = chosen_logits(x, extra_ids)
        statistics, top_ids, top_logits = _read(
            way, x, selected[:, 0], wanted, temperature, part=False
        )
        named = [selected.astype(jnp.float32), top_logits, extra.astype(jnp.float32)]
        columns = jnp.concatenate(named, axis=1)
        return finish(
            wanted, vocab_size, statistics, given, columns, top_ids, part(rows), temperature
        )

    inputs = (logits, token_ids, row_ids, num_rows, temperatures, extra_token_ids, changes)
    initial = skipped_rows(num_targets, wanted, extra_token_ids.shape[1])
    return blocks.map_blocks(work, block, num_rows, initial, inputs)


def _row_parts(
    way: Way,
    wanted: Wanted,
    logits: jax.Array,
    selected: jax.Array,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    changes: Changes | None,
) -> RowParts:
    num_targets = selected.shape[0]
    small = num_rows is not None or changes is not None
    block = way.block_rows(logits, num_targets, wanted.k, small)

    def work(start: jax.Array) -> RowParts:
        def part(x: jax.Array) -> jax.Array:
            return x if block == num_targets else lax.dynamic_slice_in_dim(x, start, block)

        x = block_of_rows(logits, row_ids, start, block, num_targets)
        x = changed_block(x, jax.tree.map(part, changes))
        temperature = None if temperatures is None else part(temperatures)
        mine = part(selected).astype(x.dtype)
        found, ids, top_logits = _read(way, x, mine, wanted, temperature, part=True)
        sums = (found.maximum, found.sum_exp, found.num_larger)
        return RowParts(*sums, ids, top_logits, found.weighted)

    initial = like_row_parts(wanted, logits, selected)
    inputs = (logits, selected, row_ids, num_rows, temperatures, changes)
    return blocks.map_blocks(work, block, num_rows, initial, inputs)


def _read(
    way: Way,
    x: jax.Array,
    selected: jax.Array,
    wanted: Wanted,
    temperatures: jax.Array | None,
    *,
    part: bool,
) -> tuple[RowStatistics, jax.Array, jax.Array]:
    """Steps 1 to 3 of a block x [B, V]: statistics, ids [B, k], logits [B, k] float32.

    selected is [B] of x's dtype. Where x is a part of longer rows, a row of it that has -inf alone
    gives a sum of 0; otherwise it gives NaN, from -inf - -inf.
    """
    k = wanted.k
    width = selection.group_width(x.shape[1], k) if way.groups else None

    def statistics_and_maxima(
        x: jax.Array, selected: jax.Array, temperatures: jax.Array | None
    ) -> tuple[RowStatistics, jax.Array | None]:
        selected = selected.astype(x.dtype)
        maximum, maxima = _maxima(way, x, width)
        reference = jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum) if part else maximum
        # Larger than what is just below the given token's logit: larger than that, or equal.
        counted = just_below(selected) if wanted.inclusive else selected
        given = Given(reference, counted, temperatures)
        weighted = way.weighted_sum(x, given) if wanted.entropy else None
        return RowStatistics(maximum, *way.sums(x, given), weighted), maxima

    if way is CPU and few_rows(x):
        wide = selected.astype(jnp.float32)  # one operation fewer out here
        statistics, maxima = in_one_thread(statistics_and_maxima, x, wide, temperatures)
    else:
        statistics, maxima = statistics_and_maxima(x, selected, temperatures)
    return statistics, *selection.select_top_k(x, maxima, k, width, way.two_stages)


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
        return lax.dynamic_slice_in_dim(blocks.tied(logits, start), start, block)
    rows = lax.dynamic_slice_in_dim(row_ids, start, block)
    copied: jax.Array = blocks.barrier(gather_rows(blocks.tied(logits, start), rows))
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


def chosen_logits(x: jax.Array, ids: jax.Array) -> jax.Array:
    """x [B, V], ids [B, C] -> [B, C] of x's dtype; NaN for an id outside the vocabulary."""
    vocabulary = x.shape[1]
    found = jnp.take_along_axis(x, jnp.clip(ids, 0, vocabulary - 1), axis=1)
    return jnp.where((ids >= 0) & (ids < vocabulary), found, jnp.asarray(jnp.nan, x.dtype))
