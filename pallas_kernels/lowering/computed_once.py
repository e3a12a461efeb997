"""Numbers that several operations use, computed once on a CPU.

XLA's CPU compiler computes what it takes for cheap again in each loop that uses it: a hash or a sum
of a group three or four times. A division it takes for dear.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels.lowering.platforms import lowered_for


def computed_once(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The same numbers, which are NaN, 0 or positive; what is below 2**-126 becomes 0 on a CPU."""
    return lowered_for(x, like=_same, cpu=_divided, default=_same)


def _same(x: jax.Array) -> jax.Array:
    return x


def _divided(x: jax.Array) -> jax.Array:
    # The compiler does not know that it is 1, and makes a product of a quotient by one number.
    return x / jnp.where(x < 0, jnp.float32(2), jnp.float32(1))
