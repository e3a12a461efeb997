"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, KV cache.

Llama, Qwen2 and Qwen3 differ in optional parameters only: biases, and norms of queries and keys.

Axis letters: B slots, S positions of one step, P positions of one prefill chunk, T positions of
the cache, L layers, D hidden size, F feed-forward size, H query heads, G key/value heads ("KVH"),
Dh head size, V vocabulary.

Everything is a pure function of (params, config, arrays): jit with `config` static. Layers are
stacked along a leading axis and run by `lax.scan`, so a model of any depth compiles as one layer.

Sources: Touvron et al., https://arxiv.org/abs/2302.13971; the rotary halves are laid out as in
Hugging Face's Llama, so that its checkpoints only need their matrices transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.params import KVCache, LayerParams, ModelParams

Aux = TypeVar("Aux")


def embed(params: ModelParams, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Embeddings [..., D] of tokens [...] int32.

    An id from V on gives NaN, so that its row is reported as invalid instead of being guessed.
    """
    rows = params.embedding.at[tokens].get(mode="fill", fill_value=jnp.nan)
    return rows.astype(jnp.dtype(config.dtype))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square (in float32), times weight [D]."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * scale).astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., N] @ w [N, M] (+ bias [M]), accumulated in float32, never in tf32 on a GPU."""
    out = jnp.einsum(
        "...n,nm->...m", x, w, precision=_precision(x), preferred_element_type=jnp.float32
    )
    if bias is not None:
        out = out + jnp.broadcast_to(bias.astype(jnp.float32), out.shape)
    return out.astype(x.dtype)


def _precision(x: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def rotary_frequencies(config: ModelConfig) -> jax.Array:
    """Radians a position [Dh/2] float32 by which each pair of a head's values is turned."""
    half = config.head_dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) / jnp.float32(-half)
    frequency: jax.Array = jnp.float32(config.rope_theta) ** exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    slow: jax.Array = frequency / jnp.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    turns = frequency * jnp.float32(scaling.original_length / (2 * math.pi))
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep: jax.Array = jnp.clip((turns - jnp.float32(low)) / jnp.float32(high - low), 0, 1)
    return keep * frequency + (1 - keep) * slow


def rotary(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotate x [B, S, N, Dh] by positions [B, S] times frequencies [Dh/2], in float32.

    Pairs are (i, i + Dh/2).
    """
    angle = jnp.einsum("bs,f->bsf", positions.astype(jnp.float32), frequencies,
                       precision=lax.Precision.HIGHEST)[:, :, None, :]  # fmt: skip
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Grouped-query attention.

    Args:
      q: [B, S, H, Dh].
      k, v: [B, T, KVH, Dh]; query heads h*H/KVH .. (h+1)*H/KVH - 1 share key head h.
      visible: [B, S, T] bool; every query must see at least one entry.

    Returns:
      [B, S, H*Dh].
    """
    b, s, h, dh = q.shape
    grouped = q.reshape(b, s, k.shape[2], h // k.shape[2], dh)
    precision = _precision(q)
    scores = jnp.einsum(
        "bsgnd,btgd->bgnst", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * jnp.float32(dh**-0.5)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(
        "bgnst,btgd->bsgnd", weights, v, precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype).reshape(b, s, h * dh)


def decoder_layer(
    layer: LayerParams,
    config: ModelConfig,
    x: jax.Array,
    positions: jax.Array,
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Aux]],
) -> tuple[jax.Array, Aux]:
    """One layer over x [B, S, D] at positions [B, S].

    `attend` gets the rotated q [B, S, H, Dh] and k [B, S, KVH, Dh], and v [B, S, KVH, Dh]; it
    returns [B, S, H*Dh] and anything else, which is passed on. So decoding (which writes a cache)
    and training (which has none) share this code.
    """
    b, s, _ = x.shape
    normed = rms_norm(x, layer.attention_norm, config.norm_eps)
    q = matmul(normed, layer.query, layer.query_bias)
    k = matmul(normed, layer.key, layer.key_bias)
    v = matmul(normed, layer.value, layer.value_bias)
    q = q.reshape(b, s, config.num_heads, config.head_dim)
    k, v = (y.reshape(b, s, config.num_kv_heads, config.head_dim) for y in (k, v))
    if layer.query_norm is not None and layer.key_norm is not None:
        q = rms_norm(q, layer.query_norm, config.norm_eps)
        k = rms_norm(k, layer.key_norm, config.norm_eps)
    frequencies = rotary_frequencies(config)
    q, k = (rotary(y, positions, frequencies) for y in (q, k))
    mixed, aux = attend(q, k, v)
    x = x + matmul(mixed, layer.output, layer.output_bias)
    normed = rms_norm(x, layer.mlp_norm, config.norm_eps)
    gated = jax.nn.silu(matmul(normed, layer.gate)) * matmul(normed, layer.up)
    return x + matmul(gated, layer.down), aux


def cached_layers(
    layers: LayerParams,
    config: ModelConfig,
    x: jax.Array,
    positions: jax.Array,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Stacked layers over x [B, S, D] at positions [B, S]; `forward` states the contract."""
    num_layers, b, length = cache.k.shape[:3]
    slots = jnp.arange(b, dtype=jnp.int32)[:, None]
    # T is out of bounds and so dropped. A negative index would wrap round instead, and
    # dynamic_update_slice would shift the whole write to make it fit.
    target = jnp.where((positions >= 0) & (positions < length), positions, length)
    # A padding row sees entry 0 and gets finite rubbish: a softmax over nothing would be NaN.
    last_seen = jnp.maximum(positions, 0)
    visible = jnp.arange(length, dtype=jnp.int32)[None, None, :] <= last_seen[:, :, None]

    def body(
        carry: tuple[jax.Array, jax.Array, jax.Array], inputs: tuple[LayerParams, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        x, all_k, all_v = carry
        layer, index = inputs

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            k, v = _contain_non_finite(k, v)
            new_k = all_k.at[index, slots, target].set(k, mode="drop")
            new_v = all_v.at[index, slots, target].set(v, mode="drop")
            mine_k = lax.dynamic_index_in_dim(new_k, index, axis=0, keepdims=False)
            mine_v = lax.dynamic_index_in_dim(new_v, index, axis=0, keepdims=False)
            return attention(q, mine_k, mine_v, visible), (new_k, new_v)

        x, (all_k, all_v) = decoder_layer(layer, config, x, positions, attend)
        return (x, all_k, all_v), None

    # The cache is carried, not mapped over: a scan's outputs would be a second cache.
    (x, k, v), _ = lax.scan(
        body, (x, cache.k, cache.v), (layers, jnp.arange(num_layers, dtype=jnp.int32))
    )
    return x, KVCache(k=k, v=v)


def _contain_non_finite(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Make a NaN in k or v [B, S, KVH, Dh] reach those who see its entry, and nobody else.

    A hidden entry has weight 0, but 0 * NaN is NaN: a stale value would spoil a slot's next
    request. Keys are masked after the product, so the NaN moves there and the value becomes 0.
    """
    sound = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


def forward(
    params: ModelParams,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Run one step: write the tokens' keys and values, let every row attend to its slot.

    Row (b, s) attends to the entries 0..positions[b, s] of slot b and to nothing else. The caller
    sees to it that those were written, before or in this step; two rows of a slot with one
    position are not allowed. A row whose position is < 0 or >= T is padding: it writes nothing,
    disturbs nobody, and its output means nothing.

    Rejected drafts leave entries behind. They are beyond the last accepted position, and the
    slot's next step starts right after that position: whoever attends to position p has p
    written in this step or accepted in an earlier one. So they are overwritten before they are
    seen, and the same holds for the entries of a slot's former request.

    The value of a row depends on shapes and on what it attends to, not on other rows.

    Args:
      tokens: [B, S] int32, 0 <= id < V (see `embed`).
      positions: [B, S] int32.
      cache: B slots of T positions.

    Returns:
      The hidden states [B, S, D] after the final norm, for `logits` and `mtp_forward`, and the
      new cache.

    Raises:
      ValueError: shapes that do not fit each other or the configuration.
    """
    check_step(config, tokens, positions, cache, config.num_layers)
    x, cache = cached_layers(params.layers, config, embed(params, config, tokens), positions, cache)
    return rms_norm(x, params.final_norm, config.norm_eps), cache


def check_step(
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    num_layers: int,
) -> None:
    """Refuse shapes that cannot belong together; called when traced."""
    if tokens.ndim != 2 or tokens.shape != positions.shape:
        raise ValueError(
            f"tokens and positions must both be [B, S]: {tokens.shape} and {positions.shape}"
        )
    b, length = tokens.shape[0], cache.k.shape[2]
    expected = (num_layers, b, length, config.num_kv_heads, config.head_dim)
    if cache.k.shape != expected or cache.v.shape != expected:
        raise ValueError(
            f"the cache must be [L, B, T, KVH, Dh] = {expected} for this configuration and step: "
            f"k is {cache.k.shape}, v is {cache.v.shape}"
        )


def logits(params: ModelParams, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [..., V] in `config.dtype` (accumulated in float32) of hidden states [..., D]."""
    head, spec = params.head, "...d,dv->...v"
    if head is None:
        head, spec = params.embedding, "...d,vd->...v"
    out = jnp.einsum(
        spec, hidden, head, precision=_precision(hidden), preferred_element_type=jnp.float32
    )
    return out.astype(jnp.dtype(config.dtype))
