"""A feed-forward part of many experts, of which each row uses a few (Mixtral, Qwen3-MoE).

Every expert computes every row, and the shares of those that a row did not choose are 0. So shapes
are static, a row's value depends on no other row, and one sum over experts and columns is all that
travels where columns are split among devices. Each step reads the weights of all experts, and its
arithmetic is X / k times that of the chosen ones (X experts, k a row). The reading is no loss where
rows are many: 32 rows that choose 8 of 128 experts each, independently, need 87 % of them.

Source: Jiang et al., https://arxiv.org/abs/2401.04088, section 2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.arithmetic import activated, matmul, weight_product
from jax_specdec.device.model.params import LayerParams


def experts(
    layer: LayerParams, config: ModelConfig, x: Float[Array, "B S E"]
) -> Float[Array, "B S E"]:
    """The sum of the chosen experts' results, each times its share."""
    assert layer.router is not None
    shares = routed(x, layer.router, config.experts_per_token, config.renormalize_experts)
    shares = shares[..., None]
    gate, up = (
        weight_product("bse,xef->bsxf", x, w).astype(x.dtype) for w in (layer.gate, layer.up)
    )
    gate, up = (y.astype(jnp.float32) for y in (activated(gate, config.activation), up))
    # Not a product with 0: an expert that the row did not choose may overflow.
    mixed = jnp.where(shares == 0, 0, shares * gate * up)
    return weight_product("bsxf,xfe->bse", mixed.astype(x.dtype), layer.down).astype(x.dtype)


def routed(
    x: Float[Array, "*rows E"], router: Float[Array, "E X"], count: int, renormalize: bool
) -> Float32[Array, "*rows X"]:
    """Each expert's share in each row; 0 for all but the `count` likeliest, of ties the first.

    Args:
      x: the rows.
      router: its weights.
      count: experts a row.
      renormalize: make the shares of a row add up to 1.
    """
    likely = jax.nn.softmax(matmul(x, router).astype(jnp.float32), axis=-1)
    largest, chosen = lax.top_k(likely, count)
    if renormalize:
        largest = largest / jnp.sum(largest, axis=-1, keepdims=True)
    one_hot = jax.nn.one_hot(chosen, router.shape[-1], dtype=jnp.float32)
    return jnp.einsum("...k,...kx->...x", largest, one_hot, precision=lax.Precision.HIGHEST)
