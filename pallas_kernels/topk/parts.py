"""A call's results from parts of its rows, of one device or of all vocabulary shards.

Every shard reads its own columns. What travels is compact: the logits of the given token and the
extra ids in one sum, then each shard's maximum, sums, count and K candidates in one gather.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends import answers
from pallas_kernels.backends.parts import combined
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.meshes.vocab_shard import VocabShard, named_logits
from pallas_kernels.numbers.ordered_keys import canonical


def topk_logprobs(
    row_parts: Callable[..., answers.RowParts],
    shard: VocabShard,
    logits: jax.Array,
    token_ids: jax.Array,
    wanted: Wanted,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
    changes: Changes | None = None,
) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` for checked arguments.

    row_parts is an implementation's. logits are [N, W], the columns of `shard`; all other
    arguments, and the result, are the same on every shard.
    """
    num_logits_rows, width = logits.shape
    num_targets = token_ids.shape[0]
    vocab_size = shard.size(width)
    logits = shard.masked(logits)
    temperatures = None if temperatures is None else answers.usable_temperatures(temperatures)
    changes = mine(changes, shard, width)
    named = jnp.concatenate([token_ids[:, None], extra_token_ids], axis=1)
    rows = jnp.arange(num_targets, dtype=jnp.int32) if row_ids is None else row_ids
    found = named_changed(logits, rows, named, shard, changes)

    own = wanted._replace(k=min(wanted.k, width))
    parts = row_parts(logits, found[:, 0], own, row_ids, num_rows, temperatures, changes)
    statistics, (ids, values) = _of_all_shards(parts, temperatures, shard, width)
    # Shards come in the order of their ids, and each shard's ties too: top_k keeps that order.
    top_logits, where = lax.top_k(canonical(values), wanted.k)
    top_ids = jnp.take_along_axis(ids, where, axis=1)
    return answers.finish(
        wanted,
        vocab_size,
        statistics,
        token_ids,
        jnp.concatenate([found[:, :1], top_logits, found[:, 1:]], axis=1),
        jnp.where(top_logits > -jnp.inf, top_ids, jnp.int32(-1)),
        answers.wanted_rows(num_logits_rows, num_targets, row_ids, num_rows),
        temperatures,
    )


def mine(changes: Changes | None, shard: VocabShard, width: int) -> Changes | None:
    """The changes of this shard's `width` columns, prepared."""
    changes = of_logits.prepared(changes, shard.size(width))
    if shard == VocabShard():
        return changes
    return of_logits.of_shard(changes, shard.ids(width)[0], width)


def named_changed(
    logits: jax.Array, rows: jax.Array, ids: jax.Array, shard: VocabShard, changes: Changes | None
) -> jax.Array:
    """`named_logits` of the changed logits; changes are this shard's."""
    if changes is None:
        return named_logits(logits, rows, ids, shard)
    clipped = jnp.clip(rows, 0, logits.shape[0] - 1)[:, None]

    def read(columns: jax.Array) -> jax.Array:
        found = logits.at[clipped, columns].get().astype(jnp.float32)
        return of_logits.apply_at(found, columns, changes)

    return shard.looked_up(ids, logits.shape[1], read)


def _of_all_shards(
    parts: answers.RowParts, temperatures: jax.Array | None, shard: VocabShard, width: int
) -> tuple[answers.RowStatistics, tuple[jax.Array, jax.Array]]:
    """The whole rows' statistics, and all shards' candidates: ids and logits [R, shards * K]."""
    num_targets, k = parts.top_ids.shape
    if shard.axis_name is None:
        own = (parts.maximum, parts.sum_exp, parts.num_larger, parts.weighted)
        return answers.RowStatistics(*own), (parts.top_ids, parts.top_logits)
    first = shard.ids(width)[0]

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    numbers = [bits(parts.maximum), bits(parts.sum_exp), parts.num_larger]
    numbers += [] if parts.weighted is None else [bits(parts.weighted)]
    columns = [jnp.stack(numbers, axis=1), parts.top_ids + first, bits(parts.top_logits)]
    every = shard.gathered(jnp.concatenate(columns, axis=1))  # [shards, R, 3 or 4, + 2 K]

    def floats(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.float32)

    statistics = answers.RowStatistics(
        floats(every[..., 0]),
        floats(every[..., 1]),
        every[..., 2],
        None if parts.weighted is None else floats(every[..., 3]),
    )

    def candidates(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(num_targets, -1)

    top = every[..., len(numbers) :]
    ids, values = top[..., :k], floats(top[..., k:])
    return combined(statistics, temperatures), (candidates(ids), candidates(values))


def call_of(row_parts: Callable[..., answers.RowParts]) -> Callable[..., Any]:
    """`topk_logprobs` on one device that has all columns."""

    def call(*arguments: Any) -> TopkLogprobs:
        return topk_logprobs(row_parts, VocabShard(), *arguments)

    return call
