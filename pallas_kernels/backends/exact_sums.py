"""Probabilities and their sums, the same bits in every program and every order of summing.

Floating-point sums depend on how the vocabulary is split among devices, and a top-p boundary would
depend on them. Here a weight in [0, 1] is cut into digits of b bits; digits are summed as integers,
which is exact, and carried afterwards. For V tokens, b + log2(V) <= 31, so that no sum leaves 32
bits. There are as many digits as keep the error of a whole row's sum below 2**-22; each weight is
rounded once, to the last digit. A weight may also be a group's sum, if all groups' are at most V.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.lowering.row_pieces import summed
from pallas_kernels.meshes.placement import WHOLE, VocabShard

Mass = tuple[jax.Array, ...]  # digits [...] uint32, the highest first; all but it below 2**b

ERROR_BITS = 22
_MANTISSA_BITS = 23  # of float32


def digit_bits(vocab_size: int) -> int:
    """b: the bits of a digit."""
    return 31 - max(1, (vocab_size - 1).bit_length())


def num_digits(vocab_size: int) -> int:
    """The number n of digits: rounding V weights to it moves their sum by V * 2**-(n b + 1)."""
    return -(-((vocab_size - 1).bit_length() + ERROR_BITS - 1) // digit_bits(vocab_size))


def digits_of_tokens(weights: jax.Array, vocab_size: int) -> tuple[jax.Array, ...]:
    """As `digits`, of weights from 0 to 1, by fewer instructions of a CPU; anything of NaN."""
    if digit_bits(vocab_size) >= _MANTISSA_BITS:
        return digits(weights, vocab_size)
    leading, rest = _leading(weights, num_digits(vocab_size) - 1, vocab_size)
    leading.append(rest * jnp.float32(2 ** digit_bits(vocab_size)))
    # Added to 2**23, a small number is rounded, and is the low bits of the sum.
    large = jnp.float32(2**_MANTISSA_BITS)
    bits = jnp.int32(np.float32(2**_MANTISSA_BITS).view(np.int32))
    return tuple(lax.bitcast_convert_type(digit + large, jnp.int32) - bits for digit in leading)


def digits(weights: jax.Array, vocab_size: int) -> tuple[jax.Array, ...]:
    """The digits [..., V] int32 of weights [..., V] float32, 0 or more, of a sum of at most V."""
    leading, rest = _leading(weights, num_digits(vocab_size) - 1, vocab_size)
    leading.append(jnp.round(rest * jnp.float32(2 ** digit_bits(vocab_size))))
    # The largest of all, V = 2**n weights of 1 in one, needs the sign bit.
    return tuple(lax.bitcast_convert_type(digit.astype(jnp.uint32), jnp.int32) for digit in leading)


def _leading(x: jax.Array, number: int, vocab_size: int) -> tuple[list[jax.Array], jax.Array]:
    """So many leading digits of x float32, as floats, and what is left of it behind them."""
    scale = jnp.float32(2 ** digit_bits(vocab_size))
    leading: list[jax.Array] = []
    # Scaling by a power of two and subtracting whole numbers are exact: only the end rounds.
    for _ in range(number):
        x = x * scale
        leading.append(jnp.floor(x))
        x = x - leading[-1]
    return leading, x


def mass(weights: jax.Array, vocab_size: int, shard: VocabShard = WHOLE) -> Mass:
    """The sum [N] of weights [N, C] over all shards, each of which has its columns of them."""
    # All digits in one reduction: else the weights are computed for each.
    digit_sums = summed(*digits(weights, vocab_size))
    return of_sums(tuple(map(shard.across_sum, digit_sums)), vocab_size)


def of_sums(added: tuple[jax.Array, ...], vocab_size: int) -> Mass:
    """The mass of which all `digits` are added up."""
    # V digits of 2**b need the sign bit, and wrap into it.
    return carried(tuple(lax.bitcast_convert_type(x, jnp.uint32) for x in added), vocab_size)


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
    leading, rest = _leading(value, num_digits(vocab_size), vocab_size)
    leading[-1] = leading[-1] + jnp.where(rest > 0, jnp.float32(1), jnp.float32(0))
    return carried(tuple(digit.astype(jnp.uint32) for digit in leading), vocab_size)


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
