"""Rotary positions: each pair of a head's values is turned by its position times its frequency.

Su et al., https://arxiv.org/abs/2104.09864. A pair is (i, i + Dh/2), as in Hugging Face's Llama, so
that its checkpoints only need their matrices transposed.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.checkpoint.rope_scaling import RopeScaling

Slides = Bool[Array, ""] | bool  # whether a layer is a sliding one; traced where layers differ


def rotary(
    x: Float[Array, "B S N Dh"],
    positions: Int32[Array, "B S"],
    frequencies: Float32[Array, " Dh//2"],
    factor: Float32[Array, ""] | float = 1.0,
) -> Float[Array, "B S N Dh"]:
    """Rotate each pair (i, i + Dh/2) by position times frequency, times `factor`, in float32."""
    angle = jnp.einsum("bs,f->bsf", positions.astype(jnp.float32), frequencies,
                       precision=lax.Precision.HIGHEST)[:, :, None, :]  # fmt: skip
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first_half, second_half = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first_half * cos - second_half * sin, second_half * cos + first_half * sin], axis=-1
    )
    if not (isinstance(factor, float) and factor == 1):
        turned = turned * factor
    return turned.astype(x.dtype)


def layer_rotation(
    config: ModelConfig, slides: Slides
) -> tuple[Float32[Array, " half"], Float32[Array, ""] | float]:
    """The frequencies and the factor of `rotary` in a layer.

    Args:
      config: of the model.
      slides: the layer is a sliding one, whose rotary base may be another.
    """
    usual = rotary_frequencies(config)
    factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    if config.sliding_rope_theta is None or slides is False:
        return usual, factor
    sliding = _frequencies(config.sliding_rope_theta, config.head_dim)
    if slides is True:
        return sliding, 1.0
    frequencies = jnp.where(slides, sliding, usual)
    return frequencies, 1.0 if factor == 1 else jnp.where(slides, 1, jnp.float32(factor))


def rotary_frequencies(config: ModelConfig) -> Float32[Array, " half"]:
    """Radians a position by which each pair of a head's values is turned."""
    frequency = _frequencies(config.rope_theta, config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    slow: jax.Array = frequency / jnp.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    keep = _kept_share(config, scaling, frequency)
    return keep * frequency + (1 - keep) * slow


def _kept_share(config: ModelConfig, scaling: RopeScaling, frequency: jax.Array) -> jax.Array:
    """The share of each pair's own frequency; the rest is of the slowed one."""
    if scaling.kind == "yarn":
        first, last = scaling.yarn_bounds(config.rope_theta, config.head_dim)
        index = jnp.arange(config.head_dim // 2, dtype=jnp.float32)
        return 1 - jnp.clip((index - jnp.float32(first)) / jnp.float32(last - first), 0, 1)
    turns = frequency * jnp.float32(scaling.original_length / (2 * math.pi))
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return jnp.clip((turns - jnp.float32(low)) / jnp.float32(high - low), 0, 1)


def _frequencies(theta: float, head_dim: int) -> Float32[Array, " half"]:
    half = head_dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / jnp.float32(-half)
    frequencies: jax.Array = jnp.float32(theta) ** exponent
    return frequencies
