"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, KV cache.

Llama, Qwen2 and Qwen3 differ in optional parameters only: biases, and norms of queries and keys.

Axis letters: B slots, S positions of one step, P positions of one prefill chunk, T positions of
the cache, L layers, E hidden size, F feed-forward size, H query heads, G key/value heads, Dh head
size, V vocabulary.

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
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.params import KVCache, LayerParams, ModelParams

Aux = TypeVar("Aux")


def forward(
    params: ModelParams,
    config: ModelConfig,
    tokens: Int32[Array, "B S"],
    positions: Int32[Array, "B S"],
    cache: KVCache,
) -> tuple[Float[Array, "B S E"], KVCache]:
    """Run one step: write the tokens' keys and values, let every row attend to its slot.

    Row (b, s) attends to the entries 0..positions[b, s] of slot b and to nothing else. The caller
    makes sure that those were written, before or in this step; two rows of a slot with one
    position are not allowed. A row whose position is < 0 or >= T is padding: it writes nothing,
    changes no other row, and its output means nothing.

    Rejected drafts leave entries behind, beyond the last accepted position. The slot's next step
    starts right after that position, so a row that attends to position p has p written in this
    step or accepted in an earlier one: stale entries are overwritten before they are seen. The
    same holds for the entries of a slot's former request.

    The value of a row depends on shapes and on what it attends to, not on other rows.

    Args:
      tokens: 0 <= id < V (see `embed`).
      positions: of the tokens in their slots.
      cache: B slots of T positions.

    Returns:
      The hidden states after the final norm, for `logits` and `mtp_forward`, and the new cache.

    Raises:
      ValueError: shapes that do not fit each other or the configuration.
    """
    check_step(config, tokens, positions, cache, config.num_layers)
    x, cache = cached_layers(params.layers, config, embed(params, config, tokens), positions, cache)
    return rms_norm(x, params.final_norm, config.norm_eps), cache


def logits(
    params: ModelParams, config: ModelConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows V"]:
    """Logits of hidden states, in `config.dtype` (accumulated in float32)."""
    head, spec = params.head, "...e,ev->...v"
    if head is None:
        head, spec = params.embedding, "...e,ve->...v"
    out = jnp.einsum(
        spec, hidden, head, precision=_precision(hidden), preferred_element_type=jnp.float32
    )
    return out.astype(jnp.dtype(config.dtype))


def check_step(
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    num_layers: int,
) -> None:
    """Refuse tokens and positions [B, S] and a cache that cannot belong together; when traced."""
    if tokens.ndim != 2 or tokens.shape != positions.shape:
        raise ValueError(
            f"tokens and positions must both be [B, S]: {tokens.shape} and {positions.shape}"
        )
    b, length = tokens.shape[0], cache.k.shape[2]
    expected = (num_layers, b, length, config.num_kv_heads, config.head_dim)
    if cache.k.shape != expected or cache.v.shape != expected:
        raise ValueError(
            f"the cache must be [L, B, T, G, Dh] = {expected} for this configuration and step: "
            f"k is {cache.k.shape}, v is {cache.v.shape}"
        )


def cached_layers(
    layers: LayerParams,
    config: ModelConfig,
    x: Float[Array, "B S E"],
    positions: Int32[Array, "B S"],
    cache: KVCache,
) -> tuple[Float[Array, "B S E"], KVCache]:
    """Run stacked layers; `forward` states the contract."""
    num_layers, _, length = cache.k.shape[:3]
    # T is out of bounds and so dropped. A negative index would wrap round instead, and
    # dynamic_update_slice would shift the whole write to make it fit.
    target = jnp.where((positions >= 0) & (positions < length), positions, length)
    # A padding row sees entry 0 and gets a finite value: a softmax over nothing would be NaN.
    last_seen = jnp.maximum(positions, 0)
    visible = jnp.arange(length, dtype=jnp.int32)[None, None, :] <= last_seen[:, :, None]

    def body(
        carry: tuple[jax.Array, KVCache], inputs: tuple[LayerParams, jax.Array]
    ) -> tuple[tuple[jax.Array, KVCache], None]:
        x, cache = carry
        layer, index = inputs

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KVCache]:
            written = _write(cache, index, target, k, v)
            own_k, own_v = (
                lax.dynamic_index_in_dim(y, index, axis=0, keepdims=False)
                for y in (written.k, written.v)
            )
            return attention(q, own_k, own_v, visible), written

        return decoder_layer(layer, config, x, positions, attend), None

    # The cache is carried, not mapped over: a scan's outputs would be a second cache.
    (x, cache), _ = lax.scan(body, (x, cache), (layers, jnp.arange(num_layers, dtype=jnp.int32)))
    return x, cache


def _write(
    cache: KVCache,
    layer: jax.Array,
    target: Int32[Array, "B S"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
) -> KVCache:
    """Put one layer's keys and values at the positions `target`; those from T on are dropped."""
    k, v = _contain_non_finite(k, v)
    slots = jnp.arange(target.shape[0], dtype=jnp.int32)[:, None]
    return KVCache(
        k=cache.k.at[layer, slots, target].set(k, mode="drop"),
        v=cache.v.at[layer, slots, target].set(v, mode="drop"),
    )


def _contain_non_finite(
    k: Float[Array, "B S G Dh"], v: Float[Array, "B S G Dh"]
) -> tuple[Float[Array, "B S G Dh"], Float[Array, "B S G Dh"]]:
    """Make a NaN in k or v reach the rows that see its entry, and no others.

    A hidden entry has weight 0, but 0 * NaN is NaN: a stale value would spoil a slot's next
    request. Keys are masked after the product, so the NaN moves there and the value becomes 0.
    """
    sound = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


def decoder_layer(
    layer: LayerParams,
    config: ModelConfig,
    x: Float[Array, "B S E"],
    positions: Int32[Array, "B S"],
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Aux]],
) -> tuple[Float[Array, "B S E"], Aux]:
    """Run one layer: attention, then the feed-forward part, each added to its input.

    `attend` gets the rotated q [B, S, H, Dh] and k [B, S, G, Dh], and v [B, S, G, Dh]. It returns
    [B, S, H * Dh] and anything else, which is passed on. So decoding (which writes a cache) and
    training (which has none) share this code.
    """
    normed = rms_norm(x, layer.attention_norm, config.norm_eps)
    mixed, aux = attend(*_heads(layer, config, normed, positions))
    x = x + matmul(mixed, layer.output, layer.output_bias)
    normed = rms_norm(x, layer.mlp_norm, config.norm_eps)
    gated = jax.nn.silu(matmul(normed, layer.gate)) * matmul(normed, layer.up)
    return x + matmul(gated, layer.down), aux


def _heads(
    layer: LayerParams,
    config: ModelConfig,
    x: Float[Array, "B S E"],
    positions: Int32[Array, "B S"],
) -> tuple[Float[Array, "B S H Dh"], Float[Array, "B S G Dh"], Float[Array, "B S G Dh"]]:
    """Queries and keys, normed where the model does so and rotated, and values."""
    b, s, _ = x.shape
    q = matmul(x, layer.query, layer.query_bias).reshape(b, s, config.num_heads, config.head_dim)
    k, v = (
        matmul(x, w, bias).reshape(b, s, config.num_kv_heads, config.head_dim)
        for w, bias in ((layer.key, layer.key_bias), (layer.value, layer.value_bias))
    )
    if layer.query_norm is not None and layer.key_norm is not None:
        q = rms_norm(q, layer.query_norm, config.norm_eps)
        k = rms_norm(k, layer.key_norm, config.norm_eps)
    frequencies = rotary_frequencies(config)
    return rotary(q, positions, frequencies), rotary(k, positions, frequencies), v


def attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B T G Dh"],
    v: Float[Array, "B T G Dh"],
    visible: Bool[Array, "B S T"],
) -> Float[Array, "B S H*Dh"]:
    """Grouped-query attention: query heads h * H/G .. (h + 1) * H/G - 1 share key head h.

    Every query must see at least one entry.
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


def embed(
    params: ModelParams, config: ModelConfig, tokens: Int32[Array, "*rows"]
) -> Float[Array, "*rows E"]:
    """Embeddings of tokens.

    An id from V on gives NaN, so that its row is reported as invalid instead of being guessed.
    """
    rows = params.embedding.at[tokens].get(mode="fill", fill_value=jnp.nan)
    return rows.astype(jnp.dtype(config.dtype))


def rms_norm(
    x: Float[Array, "*rows N"], weight: Float[Array, " N"], eps: float
) -> Float[Array, "*rows N"]:
    """x over its root mean square (in float32), times weight."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * scale).astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def matmul(
    x: Float[Array, "*rows N"], w: Float[Array, "N M"], bias: Float[Array, " M"] | None = None
) -> Float[Array, "*rows M"]:
    """x @ w (+ bias), accumulated in float32, never in tf32 on a GPU."""
    out = jnp.einsum(
        "...n,nm->...m", x, w, precision=_precision(x), preferred_element_type=jnp.float32
    )
    if bias is not None:
        out = out + jnp.broadcast_to(bias.astype(jnp.float32), out.shape)
    return out.astype(x.dtype)


def _precision(x: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def rotary(
    x: Float[Array, "B S N Dh"],
    positions: Int32[Array, "B S"],
    frequencies: Float32[Array, " Dh//2"],
) -> Float[Array, "B S N Dh"]:
    """Rotate each pair (i, i + Dh/2) by position times frequency, in float32."""
    angle = jnp.einsum("bs,f->bsf", positions.astype(jnp.float32), frequencies,
                       precision=lax.Precision.HIGHEST)[:, :, None, :]  # fmt: skip
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def rotary_frequencies(config: ModelConfig) -> Float32[Array, " half"]:
    """Radians a position by which each pair of a head's values is turned."""
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
