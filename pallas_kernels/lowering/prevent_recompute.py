"""Values that several operations use, computed a single time on a CPU.

XLA:CPU duplicates cheap producers into every consumer loop: a hash, or the sum of a group, is
computed three or four times. It never duplicates a division.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels.lowering.choose import lowered_for


def prevent_recompute(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The same numbers, which are NaN, 0 or positive; what is below 2**-126 becomes 0 on a CPU."""
    return lowered_for(x, like=_same, cpu=_divided, default=_same)


def _same(x: jax.Array) -> jax.Array:
    return x


def _divided(x: jax.Array) -> jax.Array:
    # The compiler does not know that it is 1, and makes a product of a quotient by one number.
    return x / jnp.where(x < 0, jnp.float32(2), jnp.float32(1))
