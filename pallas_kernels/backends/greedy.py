"""The greedy choice of each row, by the same rules for ties and NaN as `topk_logprobs`."""

from __future__ import annotations  # signatures print as they stand here

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from pallas_kernels.backends.xla.greedy import greedy_of_rows
from pallas_kernels.contract.changes import apply
from pallas_kernels.contract.checks import check_logits
from pallas_kernels.contract.types import Greedy, Logits, Rows
from pallas_kernels.lowering.blocks import Tree
from pallas_kernels.meshes import placement
from pallas_kernels.meshes.vocab_shard import AxisName, VocabShard


def greedy(
    logits: Logits,
    *,
    axis_name: AxisName | None = None,
    vocab_size: int | None = None,
    mesh: Mesh | None = None,
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
    axis_name: AxisName | None, vocab_size: int | None, mesh: Mesh | None
) -> Callable[[jax.Array], Greedy]:
    """`greedy` of checked logits, wherever they are; `vmap` folds a batch into rows."""

    @jax.custom_batching.custom_vmap
    def choose(logits: jax.Array) -> Greedy:
        place = placement.placed(logits, axis_name, mesh, vocab_size)
        return placement.run(place, greedy_of_part, Rows(logits))

    @choose.def_vmap
    def _folded(size: int, _: list[bool], logits: jax.Array) -> tuple[Greedy, Tree]:
        found = choose(logits.reshape(-1, logits.shape[-1]))
        outputs = jax.tree.map(lambda x: x.reshape(size, -1), found)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return jax.jit(choose)


def greedy_of_part(shard: VocabShard, rows: Rows) -> Greedy:
    """`greedy` of the rows of which this device holds the columns of `shard`."""
    logits = shard.masked(rows.logits)
    if shard.axis_name is not None:
        return _across_shards(apply(logits, rows.changes), shard)
    return greedy_of_rows(logits, rows.changes)


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
