"""A bound of the top K from below: the K-th largest of a row's group maxima.

K groups have a logit that reaches it, so K logits do. Groups may be any disjoint sets of tokens:
here they are lanes, whose maxima need no reduction over lanes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.mosaic_tpu.plan import SUBLANES
from pallas_kernels.backends.mosaic_tpu.unit import SHAPE, tree

LOWEST = -3.4028234663852886e38  # float32


def threshold(groups: list[jax.Array], k: int) -> jax.Array:
    """The bound [8, 1] float32 of rows whose group maxima are arrays [8, 128]; LOWEST or more.

    Every group counts the groups that are as large: 128 comparisons a register, and no order.
    """
    turned = [jnp.transpose(group) for group in groups]  # [128, 8]: groups on sublanes
    place = lax.broadcasted_iota(jnp.int32, SHAPE, 0)
    bound = jnp.full((SUBLANES, 1), LOWEST, jnp.float32)
    for group in groups:
        reached = jnp.zeros(SHAPE, jnp.float32)  # by how many groups each is
        for row in range(SUBLANES):
            one = group[row : row + 1]
            larger = [jnp.where(x[:, row : row + 1] >= one, 1.0, 0.0) for x in turned]
            count = jnp.sum(tree(jnp.add, larger), axis=0, keepdims=True)
            reached = jnp.where(place == row, count, reached)
        kth = jnp.max(jnp.where(reached >= k, group, LOWEST), axis=1, keepdims=True)
        bound = jnp.maximum(bound, kth)
    return bound
