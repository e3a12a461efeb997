"""The last step, from a row's compact results to its answers: all implementations share it.

One read of a row yields `RowStatistics` and candidates for its top K; shards of a row combine
theirs first. `finish` turns them into logprobs, token ranks and the answers for invalid and skipped
rows. The GPU kernels do the same in their pass 2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.numbers.logarithm import logarithm


class RowStatistics(NamedTuple):
    """Results of one read of a block of rows. Shards of a row combine by `maximum` and rescaling.

    maximum: [B] float32; anything where the row has a NaN: not every backend's maximum keeps it.
    sum_exp: [B] float32, sum of exp((x - maximum) / temperature); NaN where the row has a NaN, 0
        where it has -inf alone.
    num_larger: [B] int32, the number of logits strictly larger than the given token's; with
        inclusive ranks, those equal to it count too.
    weighted: [B] float32, sum of s exp(s), s = (x - maximum) / temperature; None without entropy.
    """

    maximum: jax.Array
    sum_exp: jax.Array
    num_larger: jax.Array
    weighted: jax.Array | None = None


class RowParts(NamedTuple):
    """Results of R rows of a part of the vocabulary: `RowStatistics` and candidates."""

    maximum: jax.Array  # [R] float32
    sum_exp: jax.Array  # [R] float32
    num_larger: jax.Array  # [R] int32
    top_ids: jax.Array  # [R, K] int32, of this part's columns; anything where the logit is -inf
    top_logits: jax.Array  # [R, K] float32, descending, ties lowest id first
    weighted: jax.Array | None = None  # [R] float32


def usable_temperatures(temperatures: jax.Array) -> jax.Array:
    """Temperatures to divide by: 0 (greedy) becomes 1; NaN where negative or not finite."""
    t = jnp.where(temperatures == 0, jnp.float32(1), temperatures)
    return jnp.where((t > 0) & jnp.isfinite(t), t, jnp.float32(jnp.nan))


def wanted_rows(
    num_logits_rows: int, num_targets: int, row_ids: jax.Array | None, num_rows: jax.Array | None
) -> jax.Array:
    """Which of R target rows are not skipped. [R] bool."""
    wanted = jnp.ones(num_targets, bool)
    if num_rows is not None:
        wanted &= jnp.arange(num_targets, dtype=jnp.int32) < num_rows
    if row_ids is not None:
        wanted &= (row_ids >= 0) & (row_ids < num_logits_rows)
    return wanted


def finish(
    wanted: Wanted,
    vocab_size: int,
    statistics: RowStatistics,
    token_ids: jax.Array,
    logits: jax.Array,
    top_ids: jax.Array,
    rows: jax.Array,
    temperatures: jax.Array | None,
) -> TopkLogprobs:
    """Step 3: logits [B, 1 + K + C] of the given token, the top K and the extra ids -> outputs.

    rows: [B] bool, those that are not skipped.
    """
    with jax.named_scope("finish"):
        k = top_ids.shape[1]
        maximum, sum_exp, num_larger, weighted = statistics
        valid = rows & jnp.isfinite(maximum) & ~jnp.isnan(sum_exp)
        scaled = logits - maximum[:, None]
        if temperatures is not None:
            scaled = scaled / temperatures[:, None]
        log_sum = logarithm(sum_exp)
        logprobs = scaled - log_sum[:, None]

        def answers(x: jax.Array) -> jax.Array:
            """x [B, ...] in rows that have an answer."""
            shape = (-1,) + (1,) * (x.ndim - 1)
            return jnp.where(valid.reshape(shape), x, jnp.float32(jnp.nan))

        logprobs = answers(logprobs)
        known = valid & ~jnp.isnan(logits[:, 0])
        if wanted.inclusive:  # all are at least -inf; some implementations count padding too
            rank = jnp.where(logits[:, 0] == -jnp.inf, jnp.int32(vocab_size), num_larger)
        else:
            rank = 1 + num_larger
        # Without a column no operation: XLA could not run interpreted kernels beside it.
        none = logits[:, :0] if wanted.top_logits else None
        return TopkLogprobs(
            token_ids=jnp.concatenate(
                [
                    jnp.where(rows, token_ids, jnp.int32(-1))[:, None],
                    jnp.where(valid[:, None], top_ids, jnp.int32(-1)),
                ],
                axis=1,
            ),
            logprobs=logprobs[:, : k + 1],
            token_ranks=jnp.where(known, rank, 0),
            extra_logprobs=logprobs[:, k + 1 :],
            log_sum_exp=(
                answers(over(maximum, temperatures) + log_sum) if wanted.log_sum_exp else None
            ),
            entropy=None if weighted is None else answers(entropy(sum_exp, weighted, temperatures)),
            top_logits=answers(logits[:, 1 : k + 1]) if wanted.top_logits and k else none,
        )


def over(x: jax.Array, temperatures: jax.Array | None) -> jax.Array:
    """x [B] over the temperatures [B], if there are any."""
    return x if temperatures is None else x / temperatures


def entropy(sum_exp: jax.Array, weighted: jax.Array, temperatures: jax.Array | None) -> jax.Array:
    """[B] of the two sums: both terms are 0 or more, so that no digits are lost."""
    found = logarithm(sum_exp) - weighted / sum_exp
    if temperatures is None:
        return found
    return jnp.where(jnp.isnan(temperatures), temperatures, found)


def skipped_rows(num_targets: int, wanted: Wanted, num_extra: int) -> TopkLogprobs:
    """The outputs of rows that were not worked on."""

    def nan(*shape: int) -> jax.Array:
        return jnp.full((num_targets, *shape), jnp.nan, jnp.float32)

    return TopkLogprobs(
        token_ids=jnp.full((num_targets, wanted.k + 1), -1, jnp.int32),
        logprobs=nan(wanted.k + 1),
        token_ranks=jnp.zeros(num_targets, jnp.int32),
        extra_logprobs=nan(num_extra),
        log_sum_exp=nan() if wanted.log_sum_exp else None,
        entropy=nan() if wanted.entropy else None,
        top_logits=nan(wanted.k) if wanted.top_logits else None,
    )
