"""A quotient with the same bits in XLA's programs and in kernels.

Compiled for a GPU, a division is `div.full.f32`, wrong by up to 2 units in the last place: more
than the contract allows of a large logprob. So the remainder is divided too. It is exact: factors
are cut into halves of 12 bits, of which every product is, so a compiler may contract it or not.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from pallas_kernels.contract.types import AnyArray

_UPPER = -(1 << 12)  # the bits of a float32's sign, exponent and first 12 digits


def quotient(a: Float32[AnyArray, "..."], b: Float32[AnyArray, "..."]) -> Float32[Array, "..."]:
    """a / b float32; shapes are equal. As a division has it that is rounded once, or next to it.

    A tie but for 2**-20 of a unit may be rounded to the other side where a division is inexact.
    """
    first = a / b
    upper, divisor = _upper(first), _upper(b)
    lower, rest_of_divisor = first - upper, b - divisor
    rest = a - upper * divisor
    rest = rest - upper * rest_of_divisor
    rest = rest - lower * divisor
    rest = rest - lower * rest_of_divisor
    better = first + rest / b
    # NaN where the quotient is infinite, or is NaN itself.
    nearest: Array = jnp.where(jnp.abs(better) < jnp.inf, better, first)
    return nearest


def _upper(x: Float32[AnyArray, "..."]) -> Float32[Array, "..."]:
    """x with its first 12 digits alone."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(_UPPER), jnp.float32)
