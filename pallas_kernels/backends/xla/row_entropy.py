"""The sum from which a row's entropy comes: s exp(s) over its logits, s = (x - maximum) / T <= 0.

With S the sum of exponentials, the entropy is log(S) minus this sum over S.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.xla.row_statistics import FIRST_PIECES, MORE_PIECES, Given
from pallas_kernels.lowering.blocks import vary_like
from pallas_kernels.numbers.pieces import in_pairs, pieces, reduced

LEAST = -200.0  # the exponential of this is 0 in float32; of -inf, -inf * 0 would be NaN


def weighted_sum(x: jax.Array, given: Given) -> jax.Array:
    """[B] float32 of x [B, V]."""
    with jax.named_scope("row_entropy"):
        found: jax.Array = lax.reduce(_terms(x, given), jnp.float32(0), lax.add, dimensions=(1,))
        return found


def weighted_sum_on_cpu(x: jax.Array, given: Given) -> jax.Array:
    """`weighted_sum`, by adding pieces of each row as `row_statistics.sums_on_cpu` does."""

    def added(x: jax.Array, given: Given) -> jax.Array:
        each: Given = jax.tree.map(lambda one: one[:, None], given)
        terms = [_terms(x[..., None], each)[..., 0] for x in pieces(x, FIRST_PIECES, -jnp.inf)]
        return reduced(jnp.add, in_pairs(jnp.add, terms), MORE_PIECES, 0)

    def nothing(x: jax.Array, given: Given) -> jax.Array:
        invalid = jnp.full(x.shape[0], jnp.nan, jnp.float32)
        return vary_like(invalid, (x, given))

    with jax.named_scope("row_entropy"):
        any_valid = jnp.any(given.reference < jnp.inf)
        found: jax.Array = lax.cond(any_valid, added, nothing, x, given)
        return found


def _terms(x: jax.Array, given: Given) -> jax.Array:
    """float32 [..., V] of x [..., V] and `given` [...]."""
    scaled = x.astype(jnp.float32) - given.reference[..., None]
    if given.temperatures is not None:
        usable = ~jnp.isnan(given.temperatures)
        inverse = jnp.where(usable, 1 / given.temperatures, jnp.float32(1))
        scaled = scaled * inverse[..., None]
    return jnp.exp(scaled) * jnp.maximum(scaled, jnp.float32(LEAST))
