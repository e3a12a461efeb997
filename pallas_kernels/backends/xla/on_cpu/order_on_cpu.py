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
from pallas_kernels.numbers.ordered_keys import floats, ordered_keys

HALF = 16  # bits of a key
ZEROS = {"bfloat16": 16, "float16": 13}  # the last bits of such a number's key, widened
COUNTED = 16  # pieces of a row that are counted at a time
MANY = 96  # numbers of a row, from which on a search is faster than a sort

Selected = tuple[jax.Array, jax.Array]  # values [B, k] and places [B, k] int32


def reached_by(keys: jax.Array, k: int) -> jax.Array:
    """A key [B] that at least k of the keys [B, n] reach: the k-th largest, or a little less.

    Of keys of 32 bits, n of them at least `MANY`, the lower 16 bits are 0.
    """
    if keys.shape[1] < MANY:
        return jnp.sort(keys, axis=1)[:, -k]
    shift = 8 * keys.dtype.itemsize - HALF
    halves = (keys >> shift).astype(jnp.int32)
    lanes = -(-keys.shape[1] // COUNTED)
    padding = ((0, 0), (0, COUNTED * lanes - keys.shape[1]))
    halves = jnp.pad(halves, padding, constant_values=np.iinfo(np.int32).min)
    # Written before the loop, and summed over its middle axis, lane by lane.
    halves = barrier(halves.reshape(keys.shape[0], COUNTED, lanes))

    def step(bit: jax.Array, found: jax.Array) -> jax.Array:
        higher = found + (jnp.int32(1 << (HALF - 1)) >> bit)
        count = (halves >= higher[:, None, None]).sum(axis=1, dtype=jnp.int32)
        return jnp.where(count.sum(axis=1, dtype=jnp.int32) >= k, higher, found)

    found = vary_like(jnp.full(keys.shape[:1], np.iinfo(np.int16).min, jnp.int32), keys)
    found = lax.fori_loop(0, HALF, step, found)
    key: jax.Array = found.astype(keys.dtype) << shift
    return key


def top_k_by_integers(x: jax.Array, k: int, dtype: DTypeLike) -> Selected:
    """`lax.top_k` of x [B, n] float32, where -0.0 equals 0.0 and NaN is anything.

    Args:
      x: numbers of `dtype`, widened; at most 32,768 a row.
      k: at most n.
      dtype: what the numbers were.
    """
    bits = (x.shape[1] - 1).bit_length()
    keys = ordered_keys(x)
    places = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape)
    low = (1 << bits) - 1
    if bits > ZEROS.get(jnp.dtype(dtype).name, 0):
        # By the half that the places would cover, first: the second order keeps it in ties.
        half = (1 << HALF) - 1
        places = jnp.sort(((~keys & half) << bits) | places, axis=1) & low
        keys = picked(keys, places)
        order = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        merged = jnp.sort((~(keys >> HALF) << bits) | order, axis=1)[:, :k]
        order = merged & low
        return floats(picked(keys, order), jnp.float32), picked(places, order)
    merged = jnp.sort((~keys & ~low) | places, axis=1)[:, :k]
    return floats(~merged & ~low, jnp.float32), merged & low


def picked(x: jax.Array, places: jax.Array) -> jax.Array:
    """The entries [B, m, ...] of x [B, n, ...] at places [B, m] int32, which are places of x."""
    rows, n, *rest = x.shape
    start = jnp.arange(rows, dtype=jnp.int32)[:, None] * n
    found: jax.Array = (
        x.reshape(-1, *rest)
        .at[start + places]
        .get(mode="promise_in_bounds", wrap_negative_indices=False)
    )
    return found
