"""The order of a few hundred numbers a row, by integers: what XLA's CPU compiler sorts fast.

Its `top_k` of 128 among 256 floats and its sort of pairs take two to eight times as long as its
sort of one array of integers. So a number and its place go into one integer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.lowering.blocks import barrier, vary_like
from pallas_kernels.numbers.ordered_keys import floats, key_of, ordered_keys
from pallas_kernels.numbers.pieces import in_pairs, pieces

HALF = 16  # bits of a key
ZEROS = {"bfloat16": 16, "float16": 13}  # the last bits of such a number's key, widened
COUNTED = 16  # pieces of a row that are counted at a time
MANY = 96  # numbers of a row, from which on a search is faster than a sort
SWAPS = 2  # rounds that put neighbors right, which their integers do not tell apart

Selected = tuple[jax.Array, jax.Array]  # values [B, k] and places [B, k] int32


def reached_by(keys: jax.Array, k: int) -> jax.Array:
    """A key [B] that at least k of the keys [B, n] reach: the k-th largest, or a little less.

    Of keys of 32 bits, n of them at least `MANY`, the lower 16 bits are 0.
    """
    if keys.shape[1] < MANY:
        return jnp.sort(keys, axis=1)[:, -k]
    shift = 8 * keys.dtype.itemsize - HALF
    parts = pieces((keys >> shift).astype(jnp.int32), COUNTED, np.iinfo(np.int32).min)

    def step(bit: jax.Array, found: jax.Array) -> jax.Array:
        higher = found + (jnp.int32(1 << (HALF - 1)) >> bit)
        flags = [(part >= higher[:, None]).astype(jnp.int32) for part in parts]
        count = in_pairs(jnp.add, flags).sum(axis=1, dtype=jnp.int32)
        return jnp.where(count >= k, higher, found)

    found = vary_like(jnp.full(keys.shape[:1], np.iinfo(np.int16).min, jnp.int32), keys)
    # A loop, before which XLA's compiler writes the parts: else it widens them for each bit.
    found = lax.fori_loop(0, HALF, step, found)
    key: jax.Array = found.astype(keys.dtype) << shift
    return key


def top_k_by_integers(x: jax.Array, k: int, dtype: DTypeLike) -> Selected:
    """`lax.top_k` of x [B, n] float32, where -0.0 equals 0.0 and NaN is anything.

    Args:
      x: numbers of `dtype`, widened; at most 65,536 a row.
      k: at most n.
      dtype: what the numbers were.
    """
    places = (x.shape[1] - 1).bit_length()
    keys = ordered_keys(x)
    low = (1 << places) - 1
    # Of equal numbers the first place is the largest integer.
    own = low - jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    merged = jnp.sort((keys & ~low) | own, axis=1)
    if places <= ZEROS.get(jnp.dtype(dtype).name, 0):
        merged = merged[:, ::-1][:, :k]
        return floats(merged & ~low, jnp.float32), low - (merged & low)
    # The first k of their exact order are among the first k + SWAPS, but for longer ties.
    some = min(k + SWAPS, x.shape[1])
    descending = merged[:, ::-1]
    place = low - (descending[:, :some] & low)
    value = barrier(jnp.take_along_axis(keys, place, axis=1))
    for number in range(SWAPS):
        value, place = _neighbors_in_order(value, place, number)
    done = jnp.all(_before(value, place)[:, :k])
    if some < x.shape[1]:
        last = value[:, k - 1]
        beyond = descending[:, some] & ~low
        done &= jnp.all(((last & ~low) > beyond) | (last == key_of(-jnp.inf, x.dtype)))

    def ordered() -> Selected:
        return floats(value[:, :k], jnp.float32), place[:, :k]

    def again() -> Selected:
        values, best = lax.top_k(floats(keys, jnp.float32), k)
        return values, best

    found: Selected = lax.cond(done, ordered, again)
    return found


def _before(value: jax.Array, place: jax.Array) -> jax.Array:
    """Whether each number [B, n - 1] comes before the next: it is larger, or equal and first."""
    a, b = value[:, :-1], value[:, 1:]
    return (a > b) | ((a == b) & (place[:, :-1] < place[:, 1:]))


def _neighbors_in_order(value: jax.Array, place: jax.Array, start: int) -> Selected:
    """Each pair of neighbors (start, start + 1), (start + 2, start + 3), ... put into order."""
    end = start + (value.shape[1] - start) // 2 * 2
    pairs = [(x[:, start:end:2], x[:, start + 1 : end : 2]) for x in (value, place)]
    (a, b), (first, second) = pairs
    right = (a > b) | ((a == b) & (first < second))

    def put(x: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
        early, late = jnp.where(right, one, other), jnp.where(right, other, one)
        middle = jnp.stack([early, late], axis=2).reshape(x.shape[0], -1)
        return jnp.concatenate([x[:, :start], middle, x[:, end:]], axis=1)

    return put(value, a, b), put(place, first, second)
