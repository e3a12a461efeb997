"""Logits as integers in the same order, for pass 2."""

import jax
import jax.numpy as jnp
from jax import lax

NOTHING = -(2**31)  # the key below all others: NaN, and what is no logit
LOWEST_KEY = 0x007FFFFF - 2**31  # of -inf

# The bits that are always equal in keys of one sign, of float32 values that were 16-bit logits.
FREE_BITS = {"bfloat16": 16, "float16": 13, "float32": 0}


def ordered_keys(x: jax.Array, nan: bool = True) -> jax.Array:
    """int32 keys in the order of float32 x, with -0.0 equal to 0.0 and NaN, if any, lowest."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = jnp.where(x == 0, 0, keys)
    return jnp.where(jnp.isnan(x), NOTHING, keys) if nan else keys


def key_values(keys: jax.Array) -> jax.Array:
    """The float32 values of ordered keys."""
    bits = jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def shortened(keys: jax.Array, dtype: str) -> jax.Array:
    """Ordered keys of logits of this dtype without the bits that carry nothing."""
    return keys >> FREE_BITS[dtype]


def lengthened(keys: jax.Array, dtype: str) -> jax.Array:
    """The ordered keys again: the free bits are ones below 0."""
    free = FREE_BITS[dtype]
    return (keys << free) | (keys >> 31 & ((1 << free) - 1))


def middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """The average of two integers, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)
