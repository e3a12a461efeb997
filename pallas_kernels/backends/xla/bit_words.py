"""Flags of a row as words of 32 bits, in which true ones are found by counting.

On a CPU these are few operations on whole vectors, where ordering or a cumulative sum would go
through the flags one by one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.lowering.forms import barrier, vary_like

_BITS = 32


def packed(flags: jax.Array) -> jax.Array:
    """flags [B, n] bool -> words [B, ceil(n / 32)] uint32; the first flag is the lowest bit."""
    rows, n = flags.shape
    words = -(-n // _BITS)
    missing = vary_like(jnp.zeros((rows, _BITS * words - n), bool), flags)
    padded = barrier(jnp.concatenate([flags, missing], axis=1)).reshape(rows, words, 4, 8)
    bits = jnp.uint32(1) << jnp.arange(_BITS, dtype=jnp.uint32).reshape(4, 8)
    parts = barrier(jnp.where(padded, bits, jnp.uint32(0)).sum(axis=2, dtype=jnp.uint32))
    return barrier(parts.sum(axis=2, dtype=jnp.uint32))


def counts(words: jax.Array) -> jax.Array:
    """How many flags of each row of words [B, W] are true: [B] int32."""
    return jnp.sum(count(words), axis=1, dtype=jnp.int32)


def leading(words: jax.Array, number: jax.Array) -> jax.Array:
    """The words [B, W] with the first `number` [B] int32 true flags of each row alone."""
    leading_bits = []
    remaining = number
    for i in range(words.shape[1]):
        word = words[:, i]
        bit_count = count(word)
        end = place_in_word(word, jnp.clip(remaining, 0, _BITS - 1))
        below = (jnp.uint32(1) << end.astype(jnp.uint32)) - 1
        leading_bits.append(
            jnp.where(remaining >= bit_count, word, jnp.where(remaining > 0, word & below, 0))
        )
        remaining = remaining - bit_count
    return jnp.stack(leading_bits, axis=1)


def places(words: jax.Array, first: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Where the true flags number `first` to `first + size - 1` of each row are.

    Args:
      words: [B, W], `packed`.
      first: [] int32, from 0.
      size: how many.

    Returns:
      Indices [B, size] int32, ascending; and which of them are there. Those of others are 0.
    """
    shape = (words.shape[0], size)
    number = first + jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), shape)
    before = jnp.zeros((shape[0], 1), jnp.int32)
    word, rest, place = jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.int32), 0 * number
    for i in range(words.shape[1]):
        next_word = words[:, i : i + 1]
        after = before + count(next_word)
        in_word = (number >= before) & (number < after)
        word = jnp.where(in_word, next_word, word)
        rest = jnp.where(in_word, number - before, rest)
        place = jnp.where(in_word, jnp.int32(_BITS * i), place)
        before = after
    there = number < before
    return jnp.where(there, place + place_in_word(word, rest), 0), there


def place_in_word(word: jax.Array, number: jax.Array) -> jax.Array:
    """Which bit of each word is its true one of this number, from 0: int32; else anything."""
    place = jnp.zeros(word.shape, jnp.int32)
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        below = count(low)
        beyond = number >= below
        number = jnp.where(beyond, number - below, number)
        word = jnp.where(beyond, word >> half, low)
        place = jnp.where(beyond, place + half, place)
    return place


def count(words: jax.Array) -> jax.Array:
    """How many bits of each word are true: int32."""
    return lax.population_count(words).astype(jnp.int32)
