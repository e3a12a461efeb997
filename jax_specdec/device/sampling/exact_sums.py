"""Probabilities and their sums, the same bits in every program and every order of summing.

Floating-point sums depend on how the vocabulary is split among devices, and exponentials on what a
compiler makes of the operations around them: a top-p boundary would depend on both. Here a weight
in [0, 1] is cut into digits of b bits; digits are summed as integers, which is exact, and carried
afterwards. For V tokens, b + log2(V) <= 31, so that no sum leaves 32 bits. There are as many digits
as keep the error of a whole row's sum below 2**-22; each weight is rounded once, to the last digit.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import VocabShard

Mass = tuple[jax.Array, ...]  # digits [...] uint32, the highest first; all but it below 2**b

ERROR_BITS = 22


# 2**f on [0, 1) is 1 + f (c1 + f (c2 + ...)), to 2e-9 of itself; a least-squares fit in float64.
EXP2 = (0.69314706, 0.24022931, 0.055485282, 0.0096754516, 0.0012467846, 0.00021612915)
LEAST_EXPONENT = -64


def exponential(x: jax.Array) -> jax.Array:
    """exp(x) float32 for x <= 0 float32, the same bits in every program; 0 below 2**-64.

    The relative error is below 2e-7 * (1 + |x|); rounding x to float32 costs as much. XLA's own
    exp rounds differently from one fused loop to the next: its products and sums may be contracted
    or not. Here no product meets a sum that a compiler could contract it with.
    """
    bits = 24
    exponent = jnp.maximum(x * jnp.float32(math.log2(math.e)), jnp.float32(LEAST_EXPONENT))
    fixed = jnp.round(exponent * jnp.float32(2**bits)).astype(jnp.int32)
    fraction = (fixed & (2**bits - 1)).astype(jnp.float32) * jnp.float32(2.0**-bits)
    power = jnp.full_like(fraction, EXP2[-1])
    for coefficient in (*EXP2[-2::-1], 1.0):
        # The product is below 2: minimum changes nothing, but a compiler cannot know that.
        power = jnp.minimum(power * fraction, jnp.float32(4)) + jnp.float32(coefficient)
    scale = lax.bitcast_convert_type(((fixed >> bits) + 127) << 23, jnp.float32)
    return jnp.where(x < LEAST_EXPONENT, jnp.float32(0), jnp.minimum(power, 2) * scale)


def digit_bits(vocab_size: int) -> int:
    """b: the bits of a digit."""
    return 31 - max(1, (vocab_size - 1).bit_length())


def num_digits(vocab_size: int) -> int:
    """The number n of digits: rounding V weights to it moves their sum by V * 2**-(n b + 1)."""
    return -(-((vocab_size - 1).bit_length() + ERROR_BITS - 1) // digit_bits(vocab_size))


def digits(weights: jax.Array, vocab_size: int) -> tuple[jax.Array, ...]:
    """The digits [..., V] int32 of weights [..., V] float32 in [0, 1]."""
    scale = jnp.float32(2 ** digit_bits(vocab_size))
    found = []
    # Scaling by a power of two and subtracting whole numbers are exact: only the end rounds.
    for _ in range(num_digits(vocab_size) - 1):
        weights = weights * scale
        found.append(jnp.floor(weights))
        weights = weights - found[-1]
    found.append(jnp.round(weights * scale))
    return tuple(digit.astype(jnp.int32) for digit in found)


def mass(
    parts: tuple[jax.Array, ...], where: jax.Array, shard: VocabShard, vocab_size: int
) -> Mass:
    """The sum of the tokens `where` [..., V] bool, over all shards; digits of `digits`."""
    return carried(
        tuple(_unsigned(shard.sum(jnp.where(where, part, 0))) for part in parts), vocab_size
    )


def carried(sums: Mass, vocab_size: int) -> Mass:
    """The same mass, with every digit but the highest below 2**b."""
    bits = jnp.uint32(digit_bits(vocab_size))
    low = jnp.uint32(2 ** digit_bits(vocab_size) - 1)
    highest, *rest = sums
    done: list[jax.Array] = []
    carry = jnp.zeros_like(highest)
    for digit in reversed(rest):
        total = digit + carry
        done.append(total & low)
        carry = total >> bits
    return (highest + carry, *reversed(done))


def at_least(value: jax.Array, vocab_size: int) -> Mass:
    """The least mass >= value [...] float32, 0 <= value <= V."""
    scale = jnp.float32(2 ** digit_bits(vocab_size))
    found = []
    for _ in range(num_digits(vocab_size)):
        value = value * scale
        found.append(jnp.floor(value))
        value = value - found[-1]
    found[-1] = found[-1] + jnp.where(value > 0, jnp.float32(1), jnp.float32(0))
    return carried(tuple(digit.astype(jnp.uint32) for digit in found), vocab_size)


def less(a: Mass, b: Mass) -> jax.Array:
    """a < b [...] bool, for carried masses."""
    below, equal = jnp.zeros(a[0].shape, bool), jnp.ones(a[0].shape, bool)
    for x, y in zip(a, b, strict=True):
        below |= equal & (x < y)
        equal &= x == y
    return below


def to_float(value: Mass, vocab_size: int) -> jax.Array:
    """The mass as float32 [...], in units of a weight of 1; relative error below 2**-22."""
    bits = digit_bits(vocab_size)
    result = jnp.zeros(value[0].shape, jnp.float32)
    for place, digit in reversed(list(enumerate(value, start=1))):
        result = result + digit.astype(jnp.float32) * jnp.float32(2.0 ** (-bits * place))
    return result


def _unsigned(x: jax.Array) -> jax.Array:
    """int32 -> uint32 of the same bits: V digits of 2**b need the sign bit, and wrap into it."""
    return lax.bitcast_convert_type(x, jnp.uint32)
