"""What `selection` does, in the forms that XLA's CPU compiler and its `top_k` are fast at.

That top_k takes the longer the more often it meets a larger value, and three quarters of its time
go to the order of what it finds. Integers it sorts five times as fast as floats.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.backends.xla.block_sizes import is_small_batch
from pallas_kernels.backends.xla.on_cpu import bit_words
from pallas_kernels.backends.xla.on_cpu.order_on_cpu import reached_by, top_k_by_integers
from pallas_kernels.backends.xla.selection import (
    NARROWEST_GROUP,
    Selected,
    among,
    group_maxima,
    row_maximum,
    slices,
    top_k,
)
from pallas_kernels.lowering.blocks import barrier, vary_like
from pallas_kernels.numbers.ordered_keys import floats, key_of
from pallas_kernels.numbers.pieces import in_pairs, pieces, reduced

PIECES = 16  # of a row of maxima, joined at a time
RUN = 16  # numbers that a search looks at together
COLLECT_K = 32  # from here on, groups are cheaper collected than ordered


def row_maximum_on_cpu(x: jax.Array) -> jax.Array:
    """`row_maximum`; a NaN may be overlooked, which is beside larger logits a negative one."""
    if x.dtype.itemsize == 4 and not is_small_batch(x):
        return row_maximum(x)
    return largest_on_cpu(group_maxima(x, NARROWEST_GROUP), x.dtype)


def largest_on_cpu(maxima: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`largest`, two to eight times as fast."""
    key = reduced(jnp.maximum, maxima, PIECES, np.iinfo(maxima.dtype).min)
    return floats(key, dtype).astype(jnp.float32)


def from_groups_on_cpu(
    x: jax.Array, maxima: jax.Array, k: int, width: int, eights: jax.Array | None = None
) -> Selected:
    """`from_groups`, without what is below a bound that is known before anything is ordered.

    eights: the `group_maxima` of eight logits each, where they are known.
    """
    bound = lower_bound(maxima, k)
    if bound is None:
        return _ordered(x, maxima, k, width)
    live = maxima >= bound[:, None]
    missing = key_of(-jnp.inf, x.dtype)

    def ordered() -> Selected:
        return _ordered(x, jnp.where(live, maxima, missing), k, width)

    if k < COLLECT_K or is_small_batch(x):
        return ordered()
    size = min(2 * k, maxima.shape[1])
    groups, count = first_places(live, size)

    def collected() -> Selected:
        used = jnp.arange(size, dtype=jnp.int32)[None] < count[:, None]
        least = floats(bound, x.dtype).astype(jnp.float32)
        if eights is None or width == NARROWEST_GROUP:
            return among(x, groups, k, width, least, used)
        return _among_eights(x, eights, groups, used, bound, k, width)

    # Many groups may share a maximum: then there is no room for all.
    found: Selected = lax.cond(jnp.all(count <= size), collected, ordered)
    return found


def _among_eights(
    x: jax.Array,
    eights: jax.Array,
    groups: jax.Array,
    used: jax.Array,
    bound: jax.Array,
    k: int,
    width: int,
) -> Selected:
    """`among`, of those eights of the groups alone that have a logit at the bound or above."""
    times, least = width // NARROWEST_GROUP, floats(bound, x.dtype).astype(jnp.float32)
    missing = -eights.shape[1] % times
    if missing:
        lowest = jnp.full((x.shape[0], missing), np.iinfo(eights.dtype).min, eights.dtype)
        eights = jnp.concatenate([eights, vary_like(lowest, eights)], axis=1)
    live = (slices(eights, groups * times, times) >= bound[:, None, None]) & used[:, :, None]
    size = min(2 * k, groups.shape[1] * times)
    places, count = first_places(live.reshape(x.shape[0], -1), size)

    def few() -> Selected:
        chosen = jnp.take_along_axis(groups, places // times, axis=1) * times + places % times
        there = jnp.arange(size, dtype=jnp.int32)[None] < count[:, None]
        top = functools.partial(_top_of_few, x.dtype)
        return among(x, chosen, k, NARROWEST_GROUP, least, there, top)

    found: Selected = lax.cond(
        jnp.all(count <= size), few, lambda: among(x, groups, k, width, least, used)
    )
    return found


def _top_of_few(dtype: DTypeLike, x: jax.Array, k: int) -> Selected:
    """`top_k` of x [B, n], of which little more than k are above -inf: these alone are ordered."""
    size = 2 * k
    if x.shape[1] <= 2 * size:
        return top_k(x, k)
    places, count = first_places(x > -jnp.inf, size)

    def compacted() -> Selected:
        there = jnp.arange(size, dtype=jnp.int32)[None] < count[:, None]
        some = jnp.where(there, jnp.take_along_axis(x, places, axis=1), -jnp.inf)
        values, best = top_k_by_integers(some, k, dtype)
        return values, jnp.take_along_axis(places, best, axis=1)

    found: Selected = lax.cond(jnp.all(count <= size), compacted, lambda: top_k(x, k))
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
    return reached_by(wider, k)


def first_places(flags: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Where the first `size` true entries of flags [B, n] are, and how many there are in all.

    Faster than `bit_words.places` where a row has many words: the word of the j-th is searched.

    Returns:
      [B, size] int32 in ascending order, 0 where there are no more; and [B] int32.
    """
    each = bit_words.packed(flags)
    words = each.shape[1]
    counts = bit_words.count(each).astype(jnp.float32)
    # By a product: XLA's CPU compiler has no fast cumulative sum. Exact below 2**24.
    upto = barrier(counts @ jnp.asarray(np.triu(np.ones((words, words), np.float32))))
    wanted = jnp.arange(size, dtype=jnp.int32)[None]
    word = barrier(jnp.minimum(_num_not_above(upto, size), words - 1))
    number = wanted - jnp.take_along_axis(upto - counts, word, axis=1).astype(jnp.int32)
    place = bit_words.place_in_word(jnp.take_along_axis(each, word, axis=1), number)
    count = upto[:, -1].astype(jnp.int32)
    return jnp.where(wanted < count[:, None], bit_words.BITS * word + place, 0), count


def _num_not_above(ascending: jax.Array, size: int) -> jax.Array:
    """How many of the numbers [B, n] in ascending order are at most 0, 1, ..., size - 1: [B, size].

    First among every 16th of them, then among 16: a table [B, size, n] would be large.
    """
    rows, n = ascending.shape
    runs = -(-n // RUN)
    beyond = vary_like(jnp.full((rows, runs * RUN - n), jnp.inf), ascending)
    table = jnp.concatenate([ascending, beyond], axis=1).reshape(rows, runs, RUN)
    number = jnp.arange(size, dtype=jnp.float32)[None, :, None]
    before = (barrier(table[:, :, -1])[:, None] <= number).sum(axis=2, dtype=jnp.int32)
    run = barrier(jnp.minimum(before, runs - 1))
    inside = jnp.take_along_axis(table, run[:, :, None], axis=1) <= number
    found: jax.Array = RUN * run + inside.sum(axis=2, dtype=jnp.int32)
    return found
