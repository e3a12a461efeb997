"""The groups of 256 tokens that a device's columns do not hold whole.

Rows that are whole on a device end in one, which is filled up. A shard of the vocabulary may end
inside of one that it has begun: then it needs the columns that the next shard begins with.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.backends.groups import WIDTH, RowPart
from pallas_kernels.backends.xla.group_sums import SHORT
from pallas_kernels.contract.changes import Changes, apply, of_shard
from pallas_kernels.meshes.placement import VocabShard

FOLLOWING = WIDTH - 1  # columns of the next shard that a group may need at most


def tail_of(x: Float[Array, "N V"], changes: Changes | None = None) -> Float[Array, "N T W"]:
    """The group [N, 1, W] that whole rows end in; [N, 0, W] where they hold all groups whole.

    changes: of x, which are applied.
    """
    columns = x.shape[1]
    rest = columns % WIDTH
    if not rest:
        return jnp.zeros((x.shape[0], 0, WIDTH), x.dtype)
    # Where there is one group alone, it need not be filled up: sums with zeros are the same.
    width = WIDTH if columns > WIDTH else next(n for n in SHORT if n >= rest)
    tail_changes = of_shard(changes, jnp.int32(columns - rest), rest)
    last = apply(x[:, columns - rest :], tail_changes)
    return jnp.pad(last, ((0, 0), (0, width - rest)), constant_values=-jnp.inf)[:, None]


def columns_of_all(values: Float[Array, "N C"], shard: VocabShard) -> Float[Array, "N V"]:
    """All shards' columns, without padding: for shards that are narrower than a group."""
    by_row = jnp.moveaxis(shard.gathered(values), 0, 1)
    return by_row.reshape(values.shape[0], -1)[:, : shard.size(values.shape[1])]


def following_columns(first: Float[Array, "N F"], width: int, shard: VocabShard) -> jax.Array:
    """The columns [N, 255] behind this device's: -inf behind the last one's.

    Args:
      first: `FOLLOWING` columns that each device begins with.
      width: columns of a device.
      shard: the vocabulary's.
    """
    assert shard.axis_name is not None
    shards = lax.axis_size(shard.axis_name)
    # Each sends its first columns to the one before it: the last has no next one, and gets zeros.
    ring = [(index, index - 1) for index in range(1, shards)]
    following = lax.ppermute(first, shard.axis_name, ring)
    start = shard.ids(width)[0]
    return jnp.where(start + width < width * shards, following, -jnp.inf)


def with_following(
    x: Float[Array, "N C"], following: Float[Array, "N F"], offset: jax.Array
) -> RowPart:
    """A device's part where groups do not end with its columns.

    offset: [] int32, the column where its first group begins.
    """
    width = x.shape[1]
    last = x[:, width - last_columns(width) :]
    return RowPart(x, tail_of_shard(last, width, following, offset), offset)


def last_columns(width: int) -> int:
    """How many columns of a shard of so many may be in the groups that it does not hold whole."""
    return min(width, 2 * WIDTH - 1)


def tail_of_shard(
    last: Float[Array, "N L"], width: int, following: Float[Array, "N F"], offset: jax.Array
) -> Float[Array, "N T W"]:
    """The two groups that a device's columns may not hold whole.

    Args:
      last: its `last_columns`.
      width: how many columns it has.
      following: the columns behind them.
      offset: [] int32, the column where its first group begins.
    """
    rows = last.shape[0]
    num_whole = width // WIDTH - 1
    # Two groups are left: the columns from here on, and what follows them.
    tail = offset + num_whole * WIDTH
    ahead = jnp.full((rows, 2 * WIDTH), -jnp.inf, last.dtype)
    line = jnp.concatenate([last, following, ahead], axis=1)
    start = tail - (width - last_columns(width))
    columns = lax.dynamic_slice_in_dim(line, start, 2 * WIDTH, axis=1)
    # What begins behind the columns is the next device's.
    begins = tail + jnp.arange(2, dtype=jnp.int32) * WIDTH
    return jnp.where((begins < width)[None, :, None], columns.reshape(rows, 2, WIDTH), -jnp.inf)
