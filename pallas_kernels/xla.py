"""The definition of `topk_logprobs` in plain `jax.numpy`, exact and with little scratch memory.

Rows are worked on in blocks, inside a loop whose trip count follows `num_rows`, so temporaries are
a few blocks and not a few copies of the logits. Within a block:

1. Row statistics: the maximum, the sum of exponentials, the number of strictly larger logits.
2. Selection in two exact stages. The vocabulary is cut into contiguous groups; the K groups with
   the largest maxima (ties: lowest group) always contain the top K. Put back into index order, one
   `lax.top_k` over their logits gives the top K with `lax.top_k`'s own order: ties lowest id first.
3. Finish: logprobs, token ranks and the answers for invalid and skipped rows.

Each step is a function of its own (step 3 in `finish`), so that vocabulary shards can run steps 1
and 2 on their part and combine the compact results before step 3.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import barrier, block_rows, map_blocks, tied
from pallas_kernels.finish import (
    RowParts,
    RowStatistics,
    finish,
    skipped_rows,
    usable_temperatures,
    wanted_rows,
)
from pallas_kernels.types import TopkLogprobs


def topk_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    k: int,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` for checked arguments; extra_token_ids may be [R, 0]."""
    num_targets = token_ids.shape[0]
    block = block_rows(logits, num_targets)

    def work(start: jax.Array) -> TopkLogprobs:
        """The outputs of target rows start .. start + block - 1."""

        def part(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, block)

        x = block_of_rows(logits, row_ids, start, block)
        wanted = part(wanted_rows(logits.shape[0], num_targets, row_ids, num_rows))
        temperature = None if temperatures is None else usable_temperatures(part(temperatures))
        return block_topk_logprobs(
            x, part(token_ids), k, wanted, temperature, part(extra_token_ids)
        )

    inputs = (logits, token_ids, row_ids, num_rows, temperatures, extra_token_ids)
    initial = skipped_rows(num_targets, k, extra_token_ids.shape[1])
    return map_blocks(work, block, num_rows, initial, inputs)


def row_parts(
    logits: jax.Array,
    selected: jax.Array,
    k: int,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
) -> RowParts:
    """Steps 1 and 2 for R rows of logits [N, V], which may be a part of longer ones.

    selected [R] float32 is the given token's logit, which may be in another part; temperatures are
    usable ones. The rest is as `topk_logprobs`. Rows that are skipped hold anything.
    """
    num_targets = selected.shape[0]
    block = block_rows(logits, num_targets)

    def work(start: jax.Array) -> RowParts:
        def part(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, block)

        x = block_of_rows(logits, row_ids, start, block)
        temperature = None if temperatures is None else part(temperatures)
        statistics = row_statistics(x, part(selected), temperature)
        return RowParts(*statistics, *select_top_k(x, k))

    zeros = jnp.zeros(num_targets, jnp.float32)
    initial = RowParts(
        maximum=zeros,
        sum_exp=zeros,
        num_larger=zeros.astype(jnp.int32),
        top_ids=jnp.zeros((num_targets, k), jnp.int32),
        top_logits=jnp.zeros((num_targets, k), jnp.float32),
    )
    inputs = (logits, selected, row_ids, num_rows, temperatures)
    return map_blocks(work, block, num_rows, initial, inputs)


def larger_than(x: jax.Array, selected: jax.Array) -> jax.Array:
    """The number of logits [B, V] float32 strictly larger than each row's [B]. [B] int32."""
    # Counted in float32 (exact below 2**24): on a CPU several times faster than in int32.
    larger = jnp.where(x > selected[:, None], jnp.float32(1), jnp.float32(0))
    return jnp.sum(larger, axis=1).astype(jnp.int32)


def block_of_rows(
    logits: jax.Array, row_ids: jax.Array | None, start: jax.Array, block: int
) -> jax.Array:
    """The logits [B, V] float32 of target rows start .. start + B - 1."""
    source = tied(logits, start)
    if row_ids is None:
        x = lax.dynamic_slice_in_dim(source, start, block)
    else:
        x = gather_rows(source, lax.dynamic_slice_in_dim(row_ids, start, block))
    block_logits: jax.Array = barrier(x).astype(jnp.float32)
    return block_logits


def gather_rows(logits: jax.Array, rows: jax.Array) -> jax.Array:
    """logits [N, V], rows [B] -> [B, V]; a row outside the logits is clamped (masked by finish)."""
    if rows.shape[0] == 1:  # a plain slice: XLA copies it at memory speed on every platform
        return lax.dynamic_slice_in_dim(logits, rows[0], 1)
    return logits.at[rows].get(mode="clip")


def block_topk_logprobs(
    x: jax.Array,
    token_ids: jax.Array,
    k: int,
    wanted: jax.Array,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
) -> TopkLogprobs:
    """Steps 1 to 3 for a block x [B, V] float32; wanted [B] bool is false for skipped rows."""
    chosen = chosen_logits(x, token_ids[:, None])
    extra = chosen_logits(x, extra_token_ids)
    statistics = row_statistics(x, chosen[:, 0], temperatures)
    top_ids, top_logits = select_top_k(x, k)
    return finish(
        statistics,
        token_ids,
        jnp.concatenate([chosen, top_logits, extra], axis=1),
        top_ids,
        wanted,
        temperatures,
    )


def chosen_logits(x: jax.Array, ids: jax.Array) -> jax.Array:
    """x [B, V], ids [B, C] -> [B, C]; NaN for an id outside the vocabulary."""
    vocabulary = x.shape[1]
    found = jnp.take_along_axis(x, jnp.clip(ids, 0, vocabulary - 1), axis=1)
    return jnp.where((ids >= 0) & (ids < vocabulary), found, jnp.float32(jnp.nan))


def row_statistics(
    x: jax.Array, selected: jax.Array, temperatures: jax.Array | None
) -> RowStatistics:
    """Step 1 for x [B, V] float32 and each row's given token's logit, selected [B]."""
    with jax.named_scope("row_statistics"):
        maximum = jnp.max(x, axis=1)
        # A row, or a shard of it, that has -inf alone gives a sum of 0; -inf - -inf would be NaN.
        scaled = x - jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)[:, None]
        if temperatures is not None:
            # A product is enough inside a sum of exponentials; finish divides.
            inverse = jnp.where(jnp.isnan(temperatures), jnp.float32(1), 1 / temperatures)
            scaled = scaled * inverse[:, None]
        return RowStatistics(maximum, jnp.sum(jnp.exp(scaled), axis=1), larger_than(x, selected))


def select_top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Step 2: x [B, V] -> ids [B, k] int32, logits [B, k], descending, ties lowest id first.

    Missing columns (fewer than k logits above -inf) hold -1 and -inf. Rows with a NaN hold
    anything: `finish` replaces them.
    """
    num_rows, vocabulary = x.shape
    if k == 0:
        return jnp.zeros((num_rows, 0), jnp.int32), jnp.zeros((num_rows, 0), x.dtype)
    with jax.named_scope("select_top_k"):
        width = group_width(vocabulary, k)
        if width is None:
            values, ids = lax.top_k(comparable(x), k)
        else:
            num_groups = -(-vocabulary // width)
            padding = num_groups * width - vocabulary
            padded = jnp.pad(x, ((0, 0), (0, padding)), constant_values=-jnp.inf)
            maxima = jnp.max(padded.reshape(num_rows, num_groups, width), axis=2)
            groups = jnp.sort(lax.top_k(comparable(maxima), k)[1], axis=1)
            candidates = groups[:, :, None] * width + jnp.arange(width, dtype=jnp.int32)[None, None]
            candidates = candidates.reshape(num_rows, k * width)
            found = jnp.take_along_axis(x, jnp.minimum(candidates, vocabulary - 1), axis=1)
            found = jnp.where(candidates < vocabulary, found, -jnp.inf)
            values, where = lax.top_k(comparable(found), k)
            ids = jnp.take_along_axis(candidates, where, axis=1)
    return jnp.where(values > -jnp.inf, ids, jnp.int32(-1)), values


def group_width(vocabulary: int, k: int) -> int | None:
    """Logits per group that make both stages' top_k short; None where one stage is as good."""
    width = 1 << max(4, round(math.log2(vocabulary / k) / 2))
    return width if vocabulary // width + k * width <= vocabulary // 4 else None


def comparable(x: jax.Array) -> jax.Array:
    """-0.0 becomes 0.0, which `lax.top_k` tells apart, and NaN -inf, which XLA's GPU top_k needs.

    https://github.com/openxla/xla/issues/48119: a negative NaN corrupts other values there.
    """
    # select, not x + 0.0: the compiler may drop an addition of zero.
    x = jnp.where(x == 0, jnp.zeros_like(x), x)
    return jnp.where(jnp.isnan(x), jnp.full_like(x, -jnp.inf), x)
