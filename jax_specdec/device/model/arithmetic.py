"""The few operations that every part of the model is made of, with their precision.

Products are summed in float32, never in tf32 on a GPU. Norms are computed in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from jax_specdec.device.model.layer_weights import ArrayALayer, OfLayer, WeightOfLayers

_LARGEST = float(np.finfo(np.float32).max)


def rms_norm(
    x: Float[Array, "*rows N"],
    weight: Float[Array, " N"],
    eps: float,
    plus_one: bool = False,
    *,
    in_one_order: bool = False,
) -> Float[Array, "*rows N"]:
    """x over its root mean square (in float32), times weight; or times 1 + weight, in float32.

    in_one_order: the squares of a row are added up in the same order in every program.
    """
    wide = x.astype(jnp.float32)
    squares = jnp.square(wide)
    if in_one_order:
        mean = sum_by_halves(squares) * jnp.float32(1 / x.shape[-1])
    else:
        mean = jnp.mean(squares, axis=-1, keepdims=True)
    scale = lax.rsqrt(mean + jnp.float32(eps))
    if plus_one:
        factor = 1 + jnp.broadcast_to(weight.astype(jnp.float32), x.shape)
        return (wide * scale * factor).astype(x.dtype)
    return (wide * scale).astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def sum_by_halves(x: Float32[Array, "*rows N"]) -> Float32[Array, "*rows 1"]:
    """The sum of each row of numbers >= 0, in an order that depends on N alone.

    XLA chooses the order of its own sums by the size of the whole array. Here the second half of a
    row is added to the first until one number is left.
    """
    # The minimum changes nothing but an infinity: no compiler contracts a product and a sum there.
    x = jnp.minimum(x, jnp.float32(_LARGEST))
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        second = jnp.pad(x[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - width)])
        x = x[..., :half] + second
    return x


def matmul(
    x: Float[Array, "*rows N"],
    w: Float[Array, "N M"] | WeightOfLayers,
    bias: Float[Array, " M"] | None = None,
) -> Float[Array, "*rows M"]:
    """x @ w (+ bias), accumulated in float32."""
    out = weight_product("...n,nm->...m", x, w)
    if bias is not None:
        out = out + jnp.broadcast_to(bias.astype(jnp.float32), out.shape)
    return out.astype(x.dtype)


def weight_product(spec: str, x: jax.Array, w: jax.Array | WeightOfLayers) -> jax.Array:
    """einsum(spec, x, w) in float32; the weight may be an `OfLayer`."""

    def times(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum(spec, x, w, precision=precision(x), preferred_element_type=jnp.float32)

    if isinstance(w, OfLayer):
        branches = [functools.partial(times, array) for array in w.arrays]
        product: jax.Array = lax.switch(w.layer, branches, x)
        return product
    assert not isinstance(w, ArrayALayer)  # a scan over layers takes one of them
    return times(w, x)


def activated(gate: Float[Array, "*rows F"], activation: str) -> Float[Array, "*rows F"]:
    """The gate's columns, through the activation that `ModelConfig` names."""
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True)
    return jax.nn.silu(gate)


def soft_capped(x: Float[Array, "*any"], cap: float | None) -> Float[Array, "*any"]:
    """x, pressed into -cap .. cap by tanh; None leaves it as it is."""
    return x if cap is None else jnp.float32(cap) * jnp.tanh(x / jnp.float32(cap))


def precision(x: jax.Array) -> lax.Precision:
    """The products' precision: float32 stays float32."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
