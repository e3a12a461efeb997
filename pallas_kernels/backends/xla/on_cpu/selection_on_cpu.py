"""What `selection` does, in the forms that XLA's CPU compiler and its `top_k` are fast at.

That top_k takes the longer the more often it meets a larger value, and three quarters of its time
go to the order of what it finds. Integers it sorts five times as fast as floats.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.backends.xla.block_sizes import is_small_batch
from pallas_kernels.backends.xla.on_cpu import bit_words
from pallas_kernels.backends.xla.on_cpu.order_on_cpu import picked, reached_by, top_k_by_integers
from pallas_kernels.backends.xla.selection import (
    NARROWEST_GROUP,
    Selected,
    among,
    group_maxima,
    logits_of_groups,
    row_maximum,
    top_k,
)
from pallas_kernels.lowering.blocks import barrier
from pallas_kernels.numbers.ordered_keys import floats, key_of
from pallas_kernels.numbers.pieces import reduced

PIECES = 16  # of a row of maxima, joined at a time
RUN = 16  # words of flags that a search looks at together
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


def from_groups_on_cpu(x: jax.Array, maxima: jax.Array, k: int, width: int) -> Selected:
    """`from_groups`, without what is below a bound that is known before anything is ordered."""
    bound = lower_bound(maxima, k)
    if bound is None or k < COLLECT_K or is_small_batch(x):
        return _ordered(x, maxima, bound, k, width)
    found, complete = _collected(x, maxima, bound, k, width)
    # Many logits may be equal: then there is no room for all.
    top: Selected = lax.cond(
        jnp.all(complete), lambda: found, lambda: top_k(x.astype(jnp.float32), k)
    )
    return top


def _collected(
    x: jax.Array, maxima: jax.Array, bound: jax.Array, k: int, width: int
) -> tuple[Selected, jax.Array]:
    """The top k among the first 2 k logits at the bound or above, and whether those are all."""
    rows, size = x.shape[0], 2 * k
    least = jnp.maximum(bound, key_of(-jnp.inf, x.dtype) + 1)
    # As many words for both searches: XLA compiles one of them.
    words = max(bit_words.number(n, RUN) for n in (maxima.shape[1], size * width))
    groups, count = first_places(maxima >= least[:, None], size, words)
    found, starts = logits_of_groups(x, groups, width)
    used = jnp.arange(size, dtype=jnp.int32)[None] < count[:, None]
    reached = found >= floats(least, x.dtype).astype(jnp.float32)[:, None, None]
    found = found.reshape(rows, size * width)
    places, number = first_places(
        (reached & used[:, :, None]).reshape(rows, size * width), size, words
    )
    there = jnp.arange(size, dtype=jnp.int32)[None] < number[:, None]
    some = jnp.where(there, picked(found, places), -jnp.inf)
    values, best = top_k_by_integers(some, k, x.dtype)
    places = picked(places, best)
    ids = picked(starts, places // width) + places % width
    return (values, ids), jnp.maximum(count, number) <= size


def _ordered(
    x: jax.Array, maxima: jax.Array, bound: jax.Array | None, k: int, width: int
) -> Selected:
    if bound is not None:
        maxima = jnp.where(maxima >= bound[:, None], maxima, key_of(-jnp.inf, x.dtype))
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
    padding = ((0, 0), (0, -maxima.shape[1] % times))
    padded = jnp.pad(maxima, padding, constant_values=np.iinfo(maxima.dtype).min)
    return reached_by(
        padded.reshape(maxima.shape[0], times, padded.shape[1] // times).max(axis=1), k
    )


def first_places(flags: jax.Array, size: int, least_words: int = 0) -> tuple[jax.Array, jax.Array]:
    """Where the first `size` true entries of flags [B, n] are, and how many there are in all.

    Faster than `bit_words.places` where a row has many words: the word of the j-th is searched,
    first its run of `RUN` words. Cumulative sums are products, which are exact below 2**24: XLA's
    CPU compiler has no fast ones.

    least_words: words that are 0 follow, up to so many.

    Returns:
      [B, size] int32 in ascending order, 0 where there are no more; and [B] int32.
    """
    each = bit_words.packed(flags, RUN)
    each = barrier(jnp.pad(each, ((0, 0), (0, max(least_words - each.shape[1], 0)))))
    runs = each.shape[1] // RUN
    own = bit_words.count(each).astype(jnp.float32).reshape(each.shape[0], runs, RUN)
    inside = barrier(own @ jnp.triu(jnp.ones((RUN, RUN), jnp.float32)))
    last = inside[:, :, -1]
    upto = barrier(last @ jnp.triu(jnp.ones((runs, runs), jnp.float32)))
    wanted = jnp.arange(size, dtype=jnp.int32)[None]
    number = wanted.astype(jnp.float32)
    run = (upto[:, None] <= number[:, :, None]).sum(axis=2, dtype=jnp.int32)
    run = barrier(jnp.minimum(run, runs - 1))
    rest = number - picked(upto - last, run)
    words = picked(inside, run)
    word = (words <= rest[:, :, None]).sum(axis=2, dtype=jnp.int32)
    word = barrier(RUN * run + jnp.minimum(word, RUN - 1))
    rest = rest - picked((inside - own).reshape(each.shape), word)
    place = bit_words.place_in_word(picked(each, word), rest.astype(jnp.int32))
    count = upto[:, -1].astype(jnp.int32)
    return barrier((jnp.where(wanted < count[:, None], bit_words.BITS * word + place, 0), count))
