"""What `selection` does, in the forms that XLA's CPU compiler and its `top_k` are fast at.

That top_k takes the longer the more often it meets a larger value, and three quarters of its time
go to the order of what it finds. Integers it sorts five times as fast as floats.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.few_rows import few_rows
from pallas_kernels.ordered_keys import floats, key_of
from pallas_kernels.pieces import in_pairs, pieces, reduced
from pallas_kernels.selection import (
    NARROWEST_GROUP,
    Selected,
    among,
    group_maxima,
    row_maximum,
    top_k,
)

PIECES = 16  # of a row of maxima, joined at a time
COLLECT_K = 32  # from here on, groups are cheaper collected than ordered
SQUARE = 64  # of the matrix that counts groups


def row_maximum_on_cpu(x: jax.Array) -> jax.Array:
    """`row_maximum`; a NaN may be overlooked, which is beside larger logits a negative one."""
    if x.dtype.itemsize == 4 and not few_rows(x):
        return row_maximum(x)
    return largest_on_cpu(group_maxima(x, NARROWEST_GROUP), x.dtype)


def largest_on_cpu(maxima: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`largest`, two to eight times as fast."""
    key = reduced(jnp.maximum, maxima, PIECES, np.iinfo(maxima.dtype).min)
    return floats(key, dtype).astype(jnp.float32)


def from_groups_on_cpu(x: jax.Array, maxima: jax.Array, k: int, width: int) -> Selected:
    """`from_groups`, without what is below a bound that is known before anything is ordered."""
    bound = lower_bound(maxima, k)
    if bound is None:
        return _ordered(x, maxima, k, width)
    live = maxima >= bound[:, None]
    missing = key_of(-jnp.inf, x.dtype)

    def ordered() -> Selected:
        return _ordered(x, jnp.where(live, maxima, missing), k, width)

    if k < COLLECT_K or few_rows(x):
        return ordered()
    size = min(2 * k, maxima.shape[1])
    places = ranks_among(live)
    count = places[:, -1:] + live[:, -1:].astype(jnp.int32)

    def collected() -> Selected:
        groups = collect(live, places, size)
        used = jnp.arange(size, dtype=jnp.int32)[None] < count
        least = floats(bound, x.dtype).astype(jnp.float32)
        return among(x, groups, k, width, least, used)

    # Many groups may share a maximum: then there is no room for all.
    found: Selected = lax.cond(jnp.all(count <= size), collected, ordered)
    return found


def _ordered(x: jax.Array, maxima: jax.Array, k: int, width: int) -> Selected:
    largest, groups = top_k(floats(maxima, x.dtype).astype(jnp.float32), k)
    # A minimum, not the last column: where XLA sees a slice of top_k's result, it sorts all n.
    return among(x, jnp.sort(groups, axis=1), k, width, jnp.min(largest, axis=1))


def lower_bound(maxima: jax.Array, k: int) -> jax.Array | None:
    """A key [B] that at least k maxima of each row [B, G] reach, and few more; None if k is large.

    It is the k-th largest of the maxima of wider groups, of which there are 1.5 to 3 times k.
    """
    times = 1
    while maxima.shape[1] // (2 * times) > 1.5 * k:
        times *= 2
    if times == 1:
        return None
    wider = in_pairs(jnp.maximum, pieces(maxima, times, np.iinfo(maxima.dtype).min))
    return jnp.sort(wider, axis=1)[:, -k]


def ranks_among(live: jax.Array) -> jax.Array:
    """How many entries before each of live [B, G] bool are true: [B, G] int32.

    By products with triangular matrices: XLA's CPU compiler has no fast cumulative sum.
    """
    rows, groups = live.shape
    squares = -(-groups // SQUARE)
    padded = jnp.pad(live, ((0, 0), (0, squares * SQUARE - groups))).astype(jnp.float32)
    table = padded.reshape(rows * squares, SQUARE)
    within = (table @ _before(SQUARE)).reshape(rows, squares, SQUARE)
    earlier = jnp.sum(table, axis=1).reshape(rows, squares) @ _before(squares)
    counts = (within + earlier[:, :, None]).reshape(rows, squares * SQUARE)  # exact below 2**24
    return counts[:, :groups].astype(jnp.int32)


def _before(size: int) -> jax.Array:
    """[size, size] float32: 1 where the row's index is less than the column's."""
    return jnp.asarray(np.triu(np.ones((size, size), np.float32), 1))


def collect(live: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """The indices of the true entries of live [B, G], at their `places`: [B, size], else 0."""
    rows, groups = live.shape
    index = jnp.broadcast_to(jnp.arange(groups, dtype=jnp.int32)[None], (rows, groups))
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    empty = jnp.zeros((rows, size), jnp.int32)
    return empty.at[row, jnp.where(live, places, size)].set(index, mode="drop")
