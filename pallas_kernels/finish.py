"""The last step, from a row's compact results to its answers: all implementations share it.

One read of a row yields `RowStatistics` and candidates for its top K; shards of a row combine
theirs first. `finish` turns them into logprobs, token ranks and the answers for invalid and skipped
rows. The GPU kernels do the same in their pass 2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.logarithm import logarithm
from pallas_kernels.types import TopkLogprobs


class RowStatistics(NamedTuple):
    """Results of one read of a block of rows. Shards of a row combine by `maximum` and rescaling.

    maximum: [B] float32; anything where the row has a NaN: not every backend's maximum keeps it.
    sum_exp: [B] float32, sum of exp((x - maximum) / temperature); NaN where the row has a NaN, 0
        where it has -inf alone.
    num_larger: [B] int32, the number of logits strictly larger than the given token's.
    """

    maximum: jax.Array
    sum_exp: jax.Array
    num_larger: jax.Array


class RowParts(NamedTuple):
    """Results of R rows of a part of the vocabulary: `RowStatistics` and candidates."""

    maximum: jax.Array  # [R] float32
    sum_exp: jax.Array  # [R] float32
    num_larger: jax.Array  # [R] int32
    top_ids: jax.Array  # [R, K] int32, of this part's columns; anything where the logit is -inf
    top_logits: jax.Array  # [R, K] float32, descending, ties lowest id first


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
    statistics: RowStatistics,
    token_ids: jax.Array,
    logits: jax.Array,
    top_ids: jax.Array,
    wanted: jax.Array,
    temperatures: jax.Array | None,
) -> TopkLogprobs:
    """Step 3: logits [B, 1 + K + C] of the given token, the top K and the extra ids -> outputs."""
    with jax.named_scope("finish"):
        k = top_ids.shape[1]
        maximum, sum_exp, num_larger = statistics
        valid = wanted & jnp.isfinite(maximum) & ~jnp.isnan(sum_exp)
        scaled = logits - maximum[:, None]
        if temperatures is not None:
            scaled = scaled / temperatures[:, None]
        logprobs = scaled - logarithm(sum_exp)[:, None]
        logprobs = jnp.where(valid[:, None], logprobs, jnp.float32(jnp.nan))
        known = valid & ~jnp.isnan(logits[:, 0])
        return TopkLogprobs(
            token_ids=jnp.concatenate(
                [
                    jnp.where(wanted, token_ids, jnp.int32(-1))[:, None],
                    jnp.where(valid[:, None], top_ids, jnp.int32(-1)),
                ],
                axis=1,
            ),
            logprobs=logprobs[:, : k + 1],
            token_ranks=jnp.where(known, 1 + num_larger, 0),
            extra_logprobs=logprobs[:, k + 1 :],
        )


def skipped_rows(num_targets: int, k: int, num_extra: int) -> TopkLogprobs:
    """The outputs of rows that were not worked on."""
    return TopkLogprobs(
        token_ids=jnp.full((num_targets, k + 1), -1, jnp.int32),
        logprobs=jnp.full((num_targets, k + 1), jnp.nan, jnp.float32),
        token_ranks=jnp.zeros(num_targets, jnp.int32),
        extra_logprobs=jnp.full((num_targets, num_extra), jnp.nan, jnp.float32),
    )
