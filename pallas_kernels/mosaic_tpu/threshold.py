"""A bound of the top K from below: the K-th largest of a row's group maxima.

K groups have a logit that reaches it, so K logits do. Groups may be any disjoint sets of tokens:
here they are lanes, whose maxima need no reduction over lanes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_tpu.plan import SUBLANES

LOWEST = -3.4028234663852886e38  # float32


def threshold(groups: list[jax.Array], k: int) -> jax.Array:
    """The bound [8, 1] float32 of rows whose group maxima are arrays [8, 128]; LOWEST or more.

    Every group counts the groups that are as large: 128 comparisons a register, and no order.
    """
    turned = [jnp.transpose(group) for group in groups]  # [128, 8]: groups on sublanes
    rows = lax.broadcasted_iota(jnp.int32, (SUBLANES, 1), 0)
    bound = jnp.full((SUBLANES, 1), LOWEST, jnp.float32)
    for row in range(SUBLANES):
        for group in groups:
            one = group[row : row + 1]
            count = jnp.zeros_like(one)
            for other in turned:
                reached = jnp.where(other[:, row : row + 1] >= one, 1.0, 0.0)
                count = count + jnp.sum(reached, axis=0, keepdims=True)
            least = jnp.max(jnp.where(count >= k, one, LOWEST), axis=1, keepdims=True)
            bound = jnp.where(rows == row, jnp.maximum(bound, least), bound)
    return bound
