"""From what one read leaves of rows to their answers: every backend's sums end here.

A read of rows leaves `RowSums`, and one of a shard's columns `PartSums`, which are joined first.
What travels is compact: the logits of the given token and of the extra ids in one sum, the rows'
maxima, then each shard's sums and K candidates in one gather; and 255 columns, where a shard ends
inside of a group. `answers` turns sums into logprobs, token ranks and the
answers of invalid and skipped rows. The GPU kernels do the same in their pass 2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.groups import WIDTH
from pallas_kernels.backends.row_totals import LEAST, PartSums, inverse_of, joined
from pallas_kernels.backends.xla.selection import top_k_of_parts
from pallas_kernels.backends.xla.tails import FOLLOWING, following_columns
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs, Rows, RowSums
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.lowering.forms import barrier
from pallas_kernels.meshes.placement import WHOLE, VocabShard
from pallas_kernels.numbers.logarithm import log_of_total
from pallas_kernels.numbers.ordered_keys import canonical, floats, ordered_keys
from pallas_kernels.numbers.quotient import quotient

# A backend's read: rows whose temperatures are usable and whose changes are its columns', the
# logit [R] float32 of each row's token, and what is wanted of them.
SumRows = Callable[[Rows, jax.Array, Outputs], RowSums]
# The same of a shard's columns: between the rows and the logits there are the columns that follow,
# and where the first group begins.
ReadPart = Callable[[Rows, jax.Array | None, jax.Array, jax.Array, Outputs], PartSums]


def topk_logprobs(row_sums: SumRows, rows: Rows, outputs: Outputs) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` of whole rows, from a backend's read.

    Args:
      row_sums: reads the rows.
      rows: with token ids.
      outputs: what is wanted.
    """
    rows = usable(rows, WHOLE)
    logits = _named(rows, WHOLE)
    return _of_sums(rows, outputs, logits, row_sums(rows, logits[:, 0], outputs), WHOLE)


def topk_logprobs_of_shard(
    part_sums: ReadPart, rows: Rows, outputs: Outputs, shard: VocabShard
) -> TopkLogprobs:
    """`topk_logprobs` of rows that several devices share.

    Args:
      part_sums: reads this device's columns.
      rows: with token ids. Its logits are the columns of `shard`; all else, and the result, is the
        same on every shard.
      outputs: what is wanted.
      shard: the columns, at least as many as a group has tokens.
    """
    width, vocab_size = rows.logits.shape[1], shard.size(rows.logits.shape[1])
    rows = usable(rows, shard)
    following, offset = None, jnp.int32(0)
    if width % WIDTH:
        changes = of_logits.of_shard(rows.changes, jnp.int32(0), FOLLOWING)
        first = of_logits.apply(rows.logits[:, :FOLLOWING][rows.places], changes)
        following = following_columns(first, width, shard)
        offset = (-shard.ids(width)[0] % WIDTH).astype(jnp.int32)
    logits = _named(rows, shard)
    most = outputs._replace(k=min(outputs.k, width))
    part = part_sums(rows, following, offset, logits[:, 0], most)
    inverse = inverse_of(rows.temperatures, rows.num_targets)
    sums = joined(part, inverse, outputs.k, vocab_size, shard, width)
    return _of_sums(rows, outputs, logits, sums, shard)


def _named(rows: Rows, shard: VocabShard) -> jax.Array:
    """The changed logits [R, 1 + C] of each row's token and of its extra ids."""
    assert rows.token_ids is not None
    ids = jnp.concatenate([rows.token_ids[:, None], rows.extra_ids], axis=1)
    return named_changed(rows, ids, shard)


def _of_sums(
    rows: Rows, outputs: Outputs, logits: jax.Array, sums: RowSums, shard: VocabShard
) -> TopkLogprobs:
    vocab_size = shard.size(rows.logits.shape[1])
    assert rows.token_ids is not None
    active = is_active(rows)
    return answers(outputs, vocab_size, sums, rows.token_ids, logits, active, rows.temperatures)


def usable(rows: Rows, shard: VocabShard) -> Rows:
    """The rows as backends read them: padding is -inf, temperatures divide, changes are its own."""
    width = rows.logits.shape[1]
    t = rows.temperatures
    return rows._replace(
        logits=shard.masked(rows.logits),
        temperatures=None if t is None else usable_temperatures(t),
        changes=changes_of_shard(rows.changes, shard, width),
    )


def usable_temperatures(temperatures: jax.Array) -> jax.Array:
    """Temperatures to divide by: 0 (greedy) becomes 1; NaN where negative or not finite."""
    t = jnp.where(temperatures == 0, jnp.float32(1), temperatures)
    return jnp.where((t > 0) & jnp.isfinite(t), t, jnp.float32(jnp.nan))


def changes_of_shard(changes: Changes | None, shard: VocabShard, width: int) -> Changes | None:
    """The changes of this shard's `width` columns, prepared."""
    if changes is None:
        return None
    changes = of_logits.prepared(changes, shard.size(width))
    if shard == VocabShard():
        return changes
    return of_logits.of_shard(changes, shard.ids(width)[0], width)


def named_changed(rows: Rows, ids: jax.Array, shard: VocabShard) -> jax.Array:
    """The changed logits [R, C] float32 of ids [R, C]; NaN for an id outside the vocabulary."""
    at, changes = rows.places[:, None], rows.changes

    def changed_at(columns: jax.Array) -> jax.Array:
        logits = rows.logits.at[at, columns].get().astype(jnp.float32)
        return logits if changes is None else of_logits.apply_at(logits, columns, changes)

    return shard.looked_up(ids, rows.logits.shape[1], changed_at)


def is_active(rows: Rows) -> jax.Array:
    """Which of the target rows are not skipped. [R] bool."""
    active = jnp.ones(rows.num_targets, bool)
    if rows.num_rows is not None:
        active &= jnp.arange(rows.num_targets, dtype=jnp.int32) < rows.num_rows
    if rows.row_ids is not None:
        active &= (rows.row_ids >= 0) & (rows.row_ids < rows.logits.shape[0])
    return active


def of_all_shards(
    sums: RowSums, k: int, temperatures: jax.Array | None, shard: VocabShard, width: int
) -> RowSums:
    """The sums of whole rows, with the vocabulary's ids and K candidates, on every shard."""
    if shard.axis_name is None:
        return sums
    sums = sums._replace(top_ids=sums.top_ids + shard.ids(width)[0])
    parts = shard.gathered_together(sums)  # [shards, R], in the order of their ids
    ids, values = top_k_of_parts(parts.top_ids, parts.top_logits, k)
    return joined_sums(parts, temperatures)._replace(top_ids=ids, top_logits=values)


def joined_sums(parts: RowSums, temperatures: jax.Array | None) -> RowSums:
    """The sums [R] of parts [parts, R], with the top K of the first part.

    temperatures: [R] float32, usable ones.
    """
    maxima, sums = parts.maximum, parts.sum_exp
    invalid = jnp.isnan(sums)
    maximum = jnp.where(jnp.isnan(maxima), -jnp.inf, maxima).max(0)
    shifted = maxima - maximum[None]
    if temperatures is not None:
        shifted = shifted * inverse_of(temperatures, maximum.shape[0])[None]
    factors = jnp.exp(shifted)
    # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
    scaled = jnp.where(sums == 0, jnp.float32(0), sums * factors)
    sum_exp = jnp.where(invalid.any(0), jnp.float32(jnp.nan), scaled.sum(0))
    weighted = parts.weighted
    if weighted is not None:
        moved = weighted + jnp.maximum(shifted, LEAST) * sums
        weighted = jnp.where(sums == 0, jnp.float32(0), moved * factors).sum(0)
    return RowSums(
        maximum,
        sum_exp,
        parts.num_larger.sum(0, dtype=jnp.int32),
        parts.top_ids[0],
        parts.top_logits[0],
        weighted,
    )


def in_order(
    top_ids: jax.Array, top_logits: jax.Array, ids: jax.Array, logits: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """Ids and logits [R, k] of the largest of a top K [R, K] and of more logits [R, D] float32.

    Ties are lowest id first, and NaN counts as -inf; k <= K + D.
    """
    backward = ~ordered_keys(canonical(jnp.concatenate([top_logits, logits], axis=1)))
    ids = jnp.concatenate([top_ids, ids], axis=1)
    backward, ids = lax.sort((backward, ids), dimension=1, num_keys=2)
    return ids[:, :k], floats(~backward[:, :k], jnp.float32)


def answers(
    outputs: Outputs,
    vocab_size: int,
    sums: RowSums,
    token_ids: jax.Array,
    named: jax.Array,
    active: jax.Array,
    temperatures: jax.Array | None,
    log_sum: jax.Array | None = None,
) -> TopkLogprobs:
    """The answers.

    Args:
      outputs: what is wanted.
      vocab_size: V.
      sums: of whole rows, with K candidates of the vocabulary's ids.
      token_ids: [R] int32, each row's own.
      named: [R, 1 + C] float32, the logits of these and of the extra ids.
      active: [R] bool, which rows are not skipped.
      temperatures: [R] float32, usable ones.
      log_sum: the logarithm of `sums.sum_exp`, where it is known.
    """
    with jax.named_scope("finish"):
        k, top_logits = outputs.k, sums.top_logits
        maximum, sum_exp = sums.maximum, sums.sum_exp
        valid = active & jnp.isfinite(maximum) & ~jnp.isnan(sum_exp)
        logits = jnp.concatenate([named[:, :1], top_logits, named[:, 1:]], axis=1)
        scaled = logits - maximum[:, None]
        if temperatures is not None:
            # Of a quotient by a broadcast, XLA makes a product in some programs and not in others.
            by = barrier(jnp.broadcast_to(temperatures[:, None], scaled.shape))
            scaled = quotient(scaled, by)
        log_sum = log_of_total(sum_exp) if log_sum is None else log_sum

        def or_nan(x: jax.Array) -> jax.Array:
            """x [R, ...] in rows that have an answer."""
            shape = (-1,) + (1,) * (x.ndim - 1)
            return jnp.where(valid.reshape(shape), x, jnp.float32(jnp.nan))

        logprobs = or_nan(scaled - log_sum[:, None])
        is_token = valid & ~jnp.isnan(named[:, 0])
        if outputs.inclusive:  # all are at least -inf; some implementations count padding too
            rank = jnp.where(named[:, 0] == -jnp.inf, jnp.int32(vocab_size), sums.num_larger)
        else:
            rank = 1 + sums.num_larger
        there = valid[:, None] & (top_logits > -jnp.inf)
        entropy = None
        if sums.weighted is not None:  # both terms are 0 or more: no digits are lost
            entropy = log_sum - quotient(sums.weighted, sum_exp)
            if temperatures is not None:
                entropy = jnp.where(jnp.isnan(temperatures), temperatures, entropy)
            entropy = or_nan(entropy)
        log_sum_exp = None
        if outputs.log_sum_exp:
            largest = maximum if temperatures is None else quotient(maximum, temperatures)
            log_sum_exp = or_nan(largest + log_sum)
        # Without a column no operation: XLA could not run interpreted kernels beside it.
        none = named[:, :0] if outputs.top_logits else None
        given_ids = jnp.where(active, token_ids, jnp.int32(-1))[:, None]
        top = jnp.where(there, sums.top_ids, jnp.int32(-1))
        return TopkLogprobs(
            token_ids=jnp.concatenate([given_ids, top], axis=1),
            logprobs=logprobs[:, : k + 1],
            token_ranks=jnp.where(is_token, rank, 0),
            extra_logprobs=logprobs[:, k + 1 :],
            log_sum_exp=log_sum_exp,
            entropy=entropy,
            top_logits=or_nan(top_logits) if outputs.top_logits and k else none,
        )
