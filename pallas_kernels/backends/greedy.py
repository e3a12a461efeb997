"""The greedy choice of each row, by the same rules for ties and NaN as `topk_logprobs`."""

from __future__ import annotations  # signatures print as they stand here

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from pallas_kernels.backends.xla.block_rows import is_symbolic, rows_on_cpu
from pallas_kernels.backends.xla.selection import NARROWEST_GROUP, slices
from pallas_kernels.contract.arguments import check_split
from pallas_kernels.contract.changes import Changes, apply
from pallas_kernels.contract.rows import Rows, check_logits
from pallas_kernels.contract.types import Greedy, Logits
from pallas_kernels.lowering import forms, row_pieces
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.meshes import split
from pallas_kernels.meshes.placement import AxisName, Split, VocabShard, placed
from pallas_kernels.numbers import ordered_keys

GROUPS_AT_ONCE = 32  # of `NARROWEST_GROUP` logits each, whose largest are joined at a time
_FEW_ROWS = 8


def greedy_of_rows(logits: jax.Array, changes: Changes | None = None) -> Greedy:
    """`greedy` of at least one whole row, as suits the platform that the program is lowered for.

    changes: of the same rows, `prepared`.
    """

    def elsewhere(logits: jax.Array, changes: Changes | None) -> Greedy:
        # Only XLA's CPU compiler makes temporaries of these reductions; others fuse them. Changed
        # logits are a copy on all; kernels choose among them, except in batches with invalid rows.
        if changes is None:
            return greedy_block(logits)
        return greedy_in_blocks(few_rows, greedy_block, logits, changes)

    on_cpu = functools.partial(greedy_in_blocks, rows_on_cpu, greedy_block_on_cpu)
    return lowered_for(logits, changes, like=lambda x, _: _none(x), cpu=on_cpu, default=elsewhere)


def few_rows(logits: jax.Array, num_rows: int, _: int, __: bool) -> int:
    """How many changed rows are copied at a time, elsewhere than on a CPU."""
    return num_rows if is_symbolic(logits, num_rows) else min(num_rows, _FEW_ROWS)


def _none(logits: jax.Array) -> Greedy:
    """No choice of rows [N, V] yet."""
    return Greedy(jnp.zeros(logits.shape[0], jnp.int32), jnp.zeros(logits.shape[0], bool))


def greedy_in_blocks(
    block_rows: Callable[..., int],
    choose: Callable[[jax.Array], Greedy],
    logits: jax.Array,
    changes: Changes | None,
) -> Greedy:
    """`greedy` of at least one row, with temporaries of a few blocks."""
    num_rows = logits.shape[0]
    block = block_rows(logits, num_rows, 0, changes is not None)

    def work(start: jax.Array) -> Greedy:
        x = forms.block_of_logits(logits, None, start, block)
        return choose(apply(x, forms.rows_from(changes, start, block)))

    return forms.map_blocks(work, block, None, _none(logits), (logits, changes))


def greedy_block(x: jax.Array) -> Greedy:
    """`greedy` of a block x [B, V]."""
    vocabulary = x.shape[1]
    keys, is_nan = _keys(x)
    largest = jnp.max(keys, axis=1)  # not argmax: maxima and minima vectorize where it does not
    ids = jnp.arange(vocabulary, dtype=jnp.int32)[None]
    first = jnp.min(jnp.where(keys == largest[:, None], ids, vocabulary), axis=1)
    # Looked for one by one: not every backend's maximum keeps a NaN.
    return _choice(x, largest, first, jnp.any(is_nan, axis=1))


def greedy_block_on_cpu(x: jax.Array) -> Greedy:
    """`greedy` of a block x [B, V] in one read: the row's largest is looked for in one group.

    Reductions of two arrays at once: XLA's CPU compiler makes four kernels of one of one array.
    """
    vocabulary = x.shape[1]
    keys, is_nan = _keys(x)

    def grouped(keys: jax.Array, is_nan: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        least, padding = _least(keys), ((0, 0), (0, -keys.shape[1] % width))
        largest, any_nan = lax.reduce(
            (
                jnp.pad(keys, padding, constant_values=least).reshape(keys.shape[0], -1, width),
                jnp.pad(is_nan, padding).reshape(keys.shape[0], -1, width),
            ),
            (least, jnp.array(False)),
            lambda a, b: (jnp.maximum(a[0], b[0]), a[1] | b[1]),
            dimensions=(2,),
        )
        return forms.barrier((largest, any_nan))

    maxima, with_nan = grouped(keys, is_nan, NARROWEST_GROUP)
    maxima, with_nan = grouped(maxima, with_nan, GROUPS_AT_ONCE)
    width = min(NARROWEST_GROUP * GROUPS_AT_ONCE, vocabulary)
    largest, group = row_pieces.largest_key_and_id(
        maxima, lax.broadcasted_iota(jnp.int32, maxima.shape, 1)
    )
    start = jnp.minimum(group * width, vocabulary - width)  # the last group may be short
    keys, _ = _keys(slices(x, start[:, None], width)[:, 0])
    ids = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    _, first = row_pieces.largest_key_and_id(keys, ids)
    return _choice(x, largest, first, jnp.any(with_nan, axis=1))


def _keys(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `ordered_keys` of x, below all others where x is NaN, and where that is."""
    keys = ordered_keys.ordered_keys(x)
    infinity = ordered_keys.key_of(jnp.inf, x.dtype)
    is_nan = (keys > infinity) | (keys < -infinity)
    return jnp.where(is_nan, _least(keys), keys), is_nan


def _least(keys: jax.Array) -> jax.Array:
    return jnp.array(np.iinfo(keys.dtype).min, keys.dtype)


def _choice(x: jax.Array, largest: jax.Array, first: jax.Array, any_nan: jax.Array) -> Greedy:
    """The answer [B] from the largest key, its lowest id and whether there is a NaN."""
    finite = jnp.isfinite(ordered_keys.floats(largest, x.dtype))
    # Where all are NaN, all have the least key, and the lowest of their ids is 0.
    return Greedy(token_ids=first, valid=finite & ~any_nan)


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
    how = Split(mesh, axis_name, vocab_size)
    check_split(*how)
    if logits.shape[0] == 0:
        return _none(logits)
    return _of_rows(how)(logits)


@functools.cache
def _of_rows(how: Split) -> Callable[[jax.Array], Greedy]:
    """`greedy` of checked logits, wherever they are; `vmap` folds a batch into rows."""

    @jax.custom_batching.custom_vmap
    def choose(logits: jax.Array) -> Greedy:
        place = placed(logits, how)
        # Both are computed: where `valid` alone was used, jaxlib's StableHLO passes crashed.
        return forms.barrier(split.run_split(place, greedy_of_part, Rows(logits)))

    @choose.def_vmap
    def _folded(size: int, _: list[bool], logits: jax.Array) -> tuple[forms.Tree, forms.Tree]:
        """Each result [size, N], and that it is batched."""
        choice = choose(logits.reshape(-1, logits.shape[-1]))
        outputs = jax.tree.map(lambda x: x.reshape(size, -1), choice)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return jax.jit(choose)


def greedy_of_part(shard: VocabShard, rows: Rows) -> Greedy:
    """`greedy` of the rows of which this device holds the columns of `shard`."""
    if shard.axis_name is not None:
        return _across_shards(apply(shard.masked(rows.logits), rows.changes), shard)
    return greedy_of_rows(shard.without_padding(rows.logits)[0], rows.changes)


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
