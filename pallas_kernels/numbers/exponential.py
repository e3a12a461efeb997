"""An exponential with the same bits in every program.

XLA's own `exp` rounds differently from one fused loop to the next: its products and sums may be
contracted or not. A sampled token would then depend on the program that drew it. Here no product
meets a sum that a compiler could contract it with.

It is written for a CPU, where it decides what a read costs: few operations, of which few wait for
one another.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from pallas_kernels.contract.types import AnyArray

# 2**f on [-1/2, 1/2] is 1 + f (c1 + f (c2 + ...)), to 1.6e-8 of itself.
EXP2 = (0.6931472, 0.24022648, 0.055503324, 0.009618437, 0.0013398875, 0.00015353362)
LEAST_EXPONENT = -127  # 2**-127 and less is 0, as -inf gives
# A sum with it is a whole number, whose last eight bits are those of a float32's exponent.
TO_WHOLE = 1.5 * 2**23 + 127


def product_apart(a: Float32[Array, "..."], b: Float32[Array, "..."]) -> Array:
    """a * b below 4: the minimum changes nothing, but a compiler cannot know that."""
    return jnp.minimum(a * b, jnp.float32(4))


Multiply = Callable[[Array, Array], Array]


def exponential(
    x: Float32[AnyArray, "*rows"], product: Multiply = product_apart
) -> Float32[Array, "*rows"]:
    """exp(x) float32 of float32 x <= 0; NaN of NaN.

    It is 0 below 2**-126 on a CPU, where XLA has no subnormal numbers, and below 2**-126.5 at the
    latest elsewhere.
    The relative error is below 2e-7 * (1 + |x|); rounding x to float32 costs as much.
    product: one below 4 that no compiler contracts with a sum.
    """
    exponent = jnp.maximum(x * jnp.float32(math.log2(math.e)), jnp.float32(LEAST_EXPONENT))
    shifted = exponent + jnp.float32(TO_WHOLE)
    # It is positive: without the absolute value, XLA would make one of the two constants.
    fraction = exponent - (jnp.abs(shifted) - jnp.float32(TO_WHOLE))
    # A power of two: this product is exact, so it may be contracted.
    return _exp2(fraction, product) * lax.bitcast_convert_type(
        lax.bitcast_convert_type(shifted, jnp.int32) << 23, jnp.float32
    )


def _exp2(f: Float32[Array, "*rows"], product: Multiply) -> Float32[Array, "*rows"]:
    """2**f: 1 + f (c1 + c2 f + c3 f**2) + f**4 (c4 + c5 f + c6 f**2), as 1 + g (b + h a)."""
    _, c2, _, c4, c5, c6 = map(jnp.float32, EXP2)
    square = f * f
    a = (c4 + product(c5, f)) + product(c6, square)
    g, h = f * c2, square * (f * jnp.float32(1 / EXP2[1]))
    b = (f + jnp.float32(EXP2[0] / EXP2[1])) + product(square, jnp.float32(EXP2[2] / EXP2[1]))
    return 1 + product(g, b + product(h, a))
