"""The kernels' results on vocabulary shards, from what each shard finds in its own columns."""

import jax
import jax.numpy as jnp

from pallas_kernels import greedy as whole
from pallas_kernels.types import Greedy
from pallas_kernels.vocab_shard import VocabShard


def greedy(logits: jax.Array, shard: VocabShard) -> Greedy:
    """`pallas_kernels.greedy` of rows [N, V] of which this device holds the columns of `shard`."""
    if shard.axis_name is None:
        return whole(shard.masked(logits))
    width = logits.shape[1]
    vocab_size = shard.size(width)
    x = shard.masked(logits)
    ids = jnp.broadcast_to(shard.ids(width)[None], x.shape)
    largest = shard.maximum(jnp.where(jnp.isnan(x), jnp.asarray(-jnp.inf, x.dtype), x))
    is_largest = (x == largest[:, None]) & (ids < vocab_size)
    first = shard.minimum(jnp.where(is_largest, ids, vocab_size))
    return Greedy(
        token_ids=jnp.where(first < vocab_size, first, 0),
        valid=jnp.isfinite(largest) & ~shard.any(jnp.isnan(x)),
    )
