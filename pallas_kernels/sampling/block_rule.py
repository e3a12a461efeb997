"""Block verification: a slot's drafts are accepted together, and never fewer of them.

Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2.
A draft that is improbable by itself may stay if those before it were likelier under p than under q.
The emitted tokens follow the target's distribution as they do draft by draft, and the expected
number of accepted drafts is the largest that any rule can have.

Axes: B slots, D drafts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.lowering.forms import vary_like


def prefix_weights(
    p: Float32[Array, "B D"], q: Float32[Array, "B D"], considered: Bool[Array, "B D"]
) -> Float32[Array, "B D1"]:
    """The weight of the first i drafts of each slot, i = 0 to D: 1 of none, at most 1.

    min(1, the weight before, times p / q), and 0 from the first draft that is not considered on.
    A draft that q could not have drawn counts as one with p / q infinite.
    """

    def next_weight(weight: jax.Array, draft: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        p, q, is_considered = draft
        joint = weight * p
        ratio = jnp.where(joint >= q, jnp.float32(1), joint / jnp.where(q > 0, q, jnp.float32(1)))
        weight = jnp.where(is_considered & (joint > 0), ratio, jnp.float32(0))
        return weight, weight

    first = vary_like(jnp.ones(p.shape[0], jnp.float32), (p, q, considered))
    _, weights = lax.scan(next_weight, first, jax.tree.map(jnp.transpose, (p, q, considered)))
    return jnp.concatenate([first[:, None], weights.T], axis=1)


def residual_mass(
    p: Float32[Array, "B D M"], q: Float32[Array, "B D M"], weights: Float32[Array, "B D"]
) -> Float32[Array, "B D"]:
    """The sums of max(w p - q, 0) over the vocabulary, where q has M tokens alone.

    p is zero in places without a token; what it has elsewhere is one minus its sum.
    """
    elsewhere = jnp.maximum(1 - p.sum(axis=2), jnp.float32(0))
    among = jnp.maximum(weights[..., None] * p - q, jnp.float32(0)).sum(axis=2)
    return weights * elsewhere + among


def num_accepted(
    u: Float32[Array, "B D"],
    weights: Float32[Array, "B D1"],
    masses: Float32[Array, "B D"],
    considered: Bool[Array, "B D"],
) -> Int32[Array, " B"]:
    """How many drafts each slot accepts.

    Args:
      u: uniform in [0, 1), of each draft.
      weights: of the first i drafts.
      masses: the residual's of the row after the first i drafts, i < D.
      considered: the leading drafts that there are.
    """
    number = considered.sum(axis=1, dtype=jnp.int32)[:, None]
    after = jnp.arange(1, considered.shape[1] + 1, dtype=jnp.int32)[None]  # so many drafts
    weight = weights[:, 1:]
    mass = jnp.concatenate([masses[:, 1:], jnp.zeros_like(masses[:, :1])], axis=1)
    rest = mass + (1 - weight)
    ratio = jnp.where(rest > 0, mass / jnp.where(rest > 0, rest, jnp.float32(1)), jnp.float32(0))
    chance = jnp.where(after == number, weight, ratio)
    stays = (u < chance) & (after <= number)
    return jnp.max(jnp.where(stays, after, 0), axis=1, initial=0)
