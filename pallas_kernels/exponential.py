"""An exponential with the same bits in every program.

XLA's own `exp` rounds differently from one fused loop to the next: its products and sums may be
contracted or not. A sampled token would then depend on the program that drew it. Here no product
meets a sum that a compiler could contract it with.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from pallas_kernels.types import AnyArray

# 2**f on [-1/2, 1/2] is 1 + f (c1 + f (c2 + ...)), to 2e-9 of itself; a minimax fit in float64.
EXP2 = (0.6931472, 0.24022648, 0.055503324, 0.009618437, 0.0013398875, 0.00015353362)
LEAST_EXPONENT = -127  # 2**-127 and less is 0, as -inf gives


def exponential(x: Float32[AnyArray, "*rows"]) -> Float32[Array, "*rows"]:
    """exp(x) float32 of float32 x <= 0; 0 below 2**-126.5, and NaN of NaN.

    The relative error is below 2e-7 * (1 + |x|); rounding x to float32 costs as much.
    """
    exponent = jnp.maximum(x * jnp.float32(math.log2(math.e)), jnp.float32(LEAST_EXPONENT))
    whole = jnp.floor(exponent + jnp.float32(0.5))
    fraction = exponent - whole
    power = jnp.full_like(fraction, EXP2[-1])
    for coefficient in (*EXP2[-2::-1], 1.0):
        # The product is below 1: minimum changes nothing, but a compiler cannot know that.
        power = jnp.minimum(power * fraction, jnp.float32(4)) + jnp.float32(coefficient)
    # A power of two: this product is exact, so it may be contracted.
    scale = lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return power * scale
