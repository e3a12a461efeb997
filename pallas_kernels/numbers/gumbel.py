"""Gumbel noise from random bits, and the logarithms that it is added to.

XLA and the kernels draw with the same arithmetic, so that they draw the same tokens.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.numbers.logarithm import logarithm


def gumbel_of_bits(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """`gumbel`, for XLA's programs: on a CPU the bits are not computed for each of its parts."""
    return gumbel(prevent_recompute(bits.astype(jnp.float32)))


def gumbel(bits: UInt32[Array, "..."] | Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Gumbel noise, one number of each 32 random bits, or of such as float32."""
    # All 32 bits, so that the smallest exponentials, which decide for rare tokens, are fine ones.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), 1 - 2.0**-24)
    # -log(1 - u): what 1 - u loses by rounding, the quotient gives back (W. Kahan).
    rest = 1 - u
    lost = jnp.where(rest < 1, 1 - rest, jnp.float32(1))
    exponential = jnp.where(rest < 1, -logarithm(rest) * (u / lost), u)
    # After a minimum that changes nothing, no compiler contracts the product and a sum.
    return -logarithm(jnp.minimum(exponential, jnp.float32(32)))


def log_of(weights: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """log of weights, 0 or more; -inf of what is 0, or next to it."""
    some = weights > jnp.float32(1e-37)  # `logarithm` is for normal numbers
    return jnp.where(some, logarithm(jnp.where(some, weights, jnp.float32(1))), -jnp.inf)
