"""The greedy choice of each row, by the same rules for ties and NaN as `topk_logprobs`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int32

from pallas_kernels.blocks import block_rows, map_blocks, tied
from pallas_kernels.checks import check_logits
from pallas_kernels.sharding import partitioned, placement
from pallas_kernels.sharding.vocab_shard import AxisName, VocabShard
from pallas_kernels.types import AnyArray, Greedy


def greedy(
    logits: Float[AnyArray, "N V"],
    *,
    axis_name: AxisName | None = None,
    vocab_size: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Greedy:
    """The greedy choice of every row and whether the row is valid.

    Args:
      logits: [N, V] bfloat16, float16 or float32; with `axis_name`, this device's columns of them.
      axis_name: the mesh axis over which the vocabulary is sharded.
      vocab_size: V, where columns of padding follow.
      mesh: outside `shard_map`, the mesh of `axis_name`, if the logits do not tell.

    Returns:
      `Greedy(token_ids [N] int32, valid [N] bool)`. The token is the lowest id among the row's
      largest non-NaN logits, with -0.0 equal to 0.0; 0 if all are NaN. A row is valid when it has
      no NaN, no +inf and at least one finite logit.
    """
    logits = lax.stop_gradient(check_logits(logits))  # ids have no derivative
    if logits.shape[0] == 0:
        return Greedy(jnp.zeros(0, jnp.int32), jnp.zeros(0, bool))
    return _of_rows(axis_name, vocab_size, mesh)(logits)


@functools.cache
def _of_rows(
    axis_name: AxisName | None, vocab_size: int | None, mesh: jax.sharding.Mesh | None
) -> Callable[[jax.Array], Greedy]:
    """`greedy` of checked logits, wherever they are; `vmap` folds a batch into rows."""

    @jax.custom_batching.custom_vmap
    def choose(logits: jax.Array) -> Greedy:
        place = placement.placed(logits, axis_name, mesh, vocab_size)
        arguments = (logits, *[None] * 5)
        if place.mesh is not None:
            return placement.run(place, _part, arguments)
        if place.unknown:
            return partitioned.run(_part, place.shard, arguments)
        return _part(place.shard, *arguments)

    @choose.def_vmap
    def _folded(size: int, _: Any, logits: jax.Array) -> Any:
        found = choose(logits.reshape(-1, logits.shape[-1]))
        outputs = jax.tree.map(lambda x: x.reshape(size, -1), found)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return jax.jit(choose)


def _part(shard: VocabShard, *arguments: jax.Array | None) -> Greedy:
    """`greedy` of the rows of which this device holds the columns of `shard`."""
    logits = arguments[0]
    assert logits is not None
    logits = shard.masked(logits)
    if shard.axis_name is not None:
        return _across_shards(logits, shard)
    # Only XLA's CPU compiler makes temporaries of these reductions; others fuse them.
    choice: Greedy = lax.platform_dependent(logits, cpu=greedy_in_blocks, default=greedy_block)
    return choice


def _across_shards(x: jax.Array, shard: VocabShard) -> Greedy:
    """`greedy` of rows of which this device holds the columns x [N, V / shards] of `shard`."""
    vocab_size = shard.size(x.shape[1])
    ids = jnp.broadcast_to(shard.ids(x.shape[1])[None], x.shape)
    largest = shard.maximum(jnp.where(jnp.isnan(x), jnp.asarray(-jnp.inf, x.dtype), x))
    is_largest = (x == largest[:, None]) & (ids < vocab_size)
    first = shard.minimum(jnp.where(is_largest, ids, vocab_size))
    return Greedy(
        token_ids=jnp.where(first < vocab_size, first, 0),
        valid=jnp.isfinite(largest) & ~shard.any(jnp.isnan(x)),
    )


def greedy_in_blocks(logits: jax.Array) -> Greedy:
    """`greedy` of at least one row, with temporaries of a few blocks."""
    num_rows = logits.shape[0]
    block = block_rows(logits, num_rows)

    def work(start: jax.Array) -> Greedy:
        return greedy_block(lax.dynamic_slice_in_dim(tied(logits, start), start, block))

    initial = Greedy(jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows, bool))
    return map_blocks(work, block, None, initial, (logits,))


def greedy_block(x: jax.Array) -> Greedy:
    """`greedy` of a block x [B, V]."""
    vocabulary = x.shape[1]
    # Not argmax: a NaN must lose against -inf, and max and min vectorize where argmax does not.
    largest = jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), axis=1)
    ids = jnp.arange(vocabulary, dtype=jnp.int32)[None]
    first = jnp.min(jnp.where(x == largest[:, None], ids, vocabulary), axis=1)
    return Greedy(
        token_ids=jnp.where(first < vocabulary, first, 0),  # none is equal where all are NaN
        # Looked for one by one: not every backend's maximum keeps a NaN.
        valid=jnp.isfinite(largest) & ~jnp.any(jnp.isnan(x), axis=1),
    )


def greedy_token_ids(logits: Float[AnyArray, "N V"]) -> Int32[jax.Array, " N"]:
    """`greedy(logits).token_ids`: [N] int32."""
    return greedy(logits).token_ids
