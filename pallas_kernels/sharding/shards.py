"""The kernels' results on vocabulary shards, from what each shard finds in its own columns.

Every shard runs the same kernel on its part. What travels is compact: the given tokens' logits in
one sum, then each shard's maximum, sum, count and K candidates in one gather. For R rows and C
extra ids that is R * (1 + C) words summed and R * (3 + 2 K) words gathered from every shard.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import finish, xla
from pallas_kernels.greedy_choice import greedy
from pallas_kernels.implementations import (
    Implementation,
    Runner,
    choose_implementation,
)
from pallas_kernels.sharding.vocab_shard import VocabShard, named_logits
from pallas_kernels.transformations import transformable
from pallas_kernels.types import TopkLogprobs


@functools.cache
def call_of(implementation: Implementation | None, k: int) -> Callable[..., TopkLogprobs]:
    """A function of (shard, *arguments): one device's part of a call, always the same object."""

    def call(shard: VocabShard, *arguments: jax.Array | None) -> TopkLogprobs:
        return transformable(functools.partial(part, shard), shard)(*arguments)

    def part(
        shard: VocabShard, logits: jax.Array, token_ids: jax.Array | None, *rest: Any
    ) -> TopkLogprobs:
        if shard.axis_name is None:
            runner = choose_implementation(implementation, logits)
            return whole(runner, shard, k, logits, token_ids, *rest)
        if token_ids is None:
            token_ids = greedy(
                logits, axis_name=shard.axis_name, vocab_size=shard.vocab_size
            ).token_ids
        return topk_logprobs(shard, implementation, logits, token_ids, k, *rest)

    return call


def whole(
    runner: Runner,
    shard: VocabShard,
    k: int,
    logits: jax.Array,
    token_ids: jax.Array | None,
    row_ids: jax.Array | None,
    *rest: Any,
) -> TopkLogprobs:
    """The call on logits of which this device has all columns."""
    logits = shard.masked(logits)
    if token_ids is None:
        return runner.greedy_topk(logits, k, *rest)
    return runner.topk(logits, token_ids, k, row_ids, *rest)


def topk_logprobs(
    shard: VocabShard,
    implementation: Implementation | None,
    logits: jax.Array,
    token_ids: jax.Array,
    k: int,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` for checked arguments, inside `shard_map`.

    logits are [N, V / shards], this device's columns; all other arguments, and the result, are the
    same on every shard.
    """
    num_logits_rows, width = logits.shape
    num_targets = token_ids.shape[0]
    logits = shard.masked(logits)
    temperatures = None if temperatures is None else finish.usable_temperatures(temperatures)
    named = jnp.concatenate([token_ids[:, None], extra_token_ids], axis=1)
    rows = jnp.arange(num_targets, dtype=jnp.int32) if row_ids is None else row_ids
    wanted = named_logits(logits, rows, named, shard)

    row_parts = choose_implementation(implementation, logits).row_parts
    parts = row_parts(logits, wanted[:, 0], min(k, width), row_ids, num_rows, temperatures)
    statistics, candidates = _combined(parts, temperatures, shard, width)
    # Shards come in the order of their ids, and each shard's ties too: top_k keeps that order.
    ids, values = candidates
    top_logits, where = lax.top_k(xla.comparable(values), k)
    top_ids = jnp.take_along_axis(ids, where, axis=1)
    return finish.finish(
        statistics,
        token_ids,
        jnp.concatenate([wanted[:, :1], top_logits, wanted[:, 1:]], axis=1),
        jnp.where(top_logits > -jnp.inf, top_ids, jnp.int32(-1)),
        finish.wanted_rows(num_logits_rows, num_targets, row_ids, num_rows),
        temperatures,
    )


def _combined(
    parts: finish.RowParts, temperatures: jax.Array | None, shard: VocabShard, width: int
) -> tuple[finish.RowStatistics, tuple[jax.Array, jax.Array]]:
    """The whole rows' statistics, and all shards' candidates: ids and logits [R, shards * K]."""
    num_targets = parts.maximum.shape[0]
    first = shard.ids(width)[0]

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    packed = jnp.concatenate(
        [
            jnp.stack([bits(parts.maximum), bits(parts.sum_exp), parts.num_larger], axis=1),
            parts.top_ids + first,
            bits(parts.top_logits),
        ],
        axis=1,
    )
    every = shard.gathered(packed)  # [shards, R, 3 + 2 K]
    maxima, sums = (lax.bitcast_convert_type(every[..., i], jnp.float32) for i in (0, 1))
    invalid = jnp.isnan(sums)
    maximum = jnp.where(jnp.isnan(maxima), -jnp.inf, maxima).max(0)
    shifted = maxima - maximum[None]
    if temperatures is not None:
        inverse = jnp.where(jnp.isnan(temperatures), jnp.float32(1), 1 / temperatures)
        shifted = shifted * inverse[None]
    # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
    scaled = jnp.where(sums == 0, jnp.float32(0), sums * jnp.exp(shifted))
    sum_exp = jnp.where(invalid.any(0), jnp.float32(jnp.nan), scaled.sum(0))
    num_larger = every[..., 2].sum(0, dtype=jnp.int32)

    def candidates(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(num_targets, -1)

    k = parts.top_ids.shape[1]
    ids, values = every[..., 3 : 3 + k], every[..., 3 + k :]
    values = lax.bitcast_convert_type(values, jnp.float32)
    return finish.RowStatistics(maximum, sum_exp, num_larger), (candidates(ids), candidates(values))
