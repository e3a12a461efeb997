"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, KV cache.

The families differ in options of `ModelConfig` and in optional parameters. Layers may slide: their
rows see the nearest positions only.

Axis letters: B slots of a step, C slots of the cache, S positions of one step, P positions of one
prefill chunk, T positions of the cache, L layers, E hidden size, F feed-forward size, H query
heads, G key/value heads, Dh head size, V vocabulary.

Everything is a pure function of (params, config, arrays): jit with `config` static. Layers are
stacked along a leading axis and run by `lax.scan`, so a model of any depth compiles as one layer.

Sources: Touvron et al., https://arxiv.org/abs/2302.13971; sliding layers: Jiang et al.,
https://arxiv.org/abs/2310.06825; norms behind, soft caps: https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.arithmetic import (
    activated,
    matmul,
    precision,
    rms_norm,
    soft_capped,
)
from jax_specdec.device.model.attention import (
    Seen,
    attention,  # noqa: F401  part of the door's `llama`
    attention_in_tiles,
    cached_attention,
)
from jax_specdec.device.model.experts import experts
from jax_specdec.device.model.layer_arrays import of_layer, stacks_of
from jax_specdec.device.model.params import KVCache, LayerParams, ModelParams
from jax_specdec.device.model.rotary import Slides, layer_rotation, rotary
from jax_specdec.device.model.tiles import over_rows

Aux = TypeVar("Aux")

# Tiles that a head which is the embedding takes at once, where there is a `row_step`: on CPUs, rows
# times a transposed matrix are added up in one order, however many they are.
EMBEDDING_TILES = 8


def forward(
    params: ModelParams,
    config: ModelConfig,
    tokens: Int32[Array, "B S"],
    positions: Int32[Array, "B S"],
    cache: Annotated[KVCache, "B = C"],
    slot: Int32[Array, ""] | None = None,
) -> tuple[Float[Array, "B S E"], Annotated[KVCache, "B = C"]]:
    """Run one step: write the tokens' keys and values, let every row attend to its slot.

    Row (b, s) attends to the entries 0..positions[b, s] of slot b, in sliding layers to the last
    `sliding_window` of these, and to nothing else. The caller
    makes sure that those were written, before or in this step; two rows of a slot with one
    position are not allowed. A row whose position is < 0 or >= T is padding: it writes nothing,
    changes no other row, and its output means nothing.

    Rejected drafts leave entries behind, beyond the last accepted position. The slot's next step
    starts right after that position, so a row that attends to position p has p written in this
    step or accepted in an earlier one: stale entries are overwritten before they are seen. The
    same holds for the entries of a slot's former request.

    The value of a row depends on shapes and on what it attends to, not on other rows. The time of
    a step depends on the last entry that any row attends to, not on T.

    Args:
      tokens: 0 <= id < V (see `embed`).
      positions: of the tokens in their slots.
      cache: B slots of T positions; with `slot`, any number of them.
      slot: of the cache, that a single row of tokens (B = 1) belongs to; None: row b to slot b.
        Outside the cache nothing is written, and the output means nothing.

    Returns:
      The hidden states for `logits` and `mtp_forward`, and the new cache. They are those after the
      final norm, or before it where the configuration says `norm_in_head`.

    Raises:
      ValueError: shapes that do not fit each other or the configuration.
    """
    check_step(config, tokens, positions, cache, config.num_layers, slot)
    x = embed(params, config, tokens)
    x, cache = cached_layers(
        params.layers, config, x, positions, cache, slot, sliding=config.sliding_layers
    )
    return final_norm(params, config, x), cache


def final_norm(
    params: ModelParams, config: ModelConfig, x: Float[Array, "B S E"]
) -> Float[Array, "B S E"]:
    """The hidden states that the last layer's results are, as `forward` returns them."""
    if config.norm_in_head:
        return x
    return over_rows(lambda x: norm(config, x, params.final_norm), x, tile=config.row_tiles)


def logits(
    params: ModelParams, config: ModelConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows V"]:
    """Logits of hidden states, in `config.dtype` (accumulated in float32)."""

    def head(hidden: jax.Array) -> jax.Array:
        return project(params, config, before_head(params, config, hidden))

    tile = config.row_tiles
    plain = params.head is None and not config.norm_in_head
    if tile is not None and config.row_step is not None and plain:
        tile = EMBEDDING_TILES * tile[0], tile[1]
    return over_rows(head, hidden, tile=tile, axes=hidden.ndim - 1)


def before_head(
    params: ModelParams, config: ModelConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows E"]:
    """The states that the output head is multiplied with."""
    return norm(config, hidden, params.final_norm) if config.norm_in_head else hidden


def project(
    params: ModelParams, config: ModelConfig, hidden: Float[Array, "*rows E"]
) -> Float[Array, "*rows V"]:
    """Logits of hidden states that are normed already, such as the MTP head's; see `logits`.

    Padding of the vocabulary has -inf.
    """
    head, axes = unembedding(params)
    out = jnp.einsum(
        f"...h,{axes.lower()}->...v", hidden, head,
        precision=precision(hidden), preferred_element_type=jnp.float32,
    )  # fmt: skip
    out = soft_capped(out, config.logit_softcap)
    if config.vocab_padding:
        is_token = jnp.arange(config.num_columns, dtype=jnp.int32) < config.vocab_size
        out = jnp.where(jnp.broadcast_to(is_token, out.shape), out, -jnp.inf)
    return out.astype(jnp.dtype(config.dtype))


def unembedding(params: ModelParams) -> tuple[Float[Array, "_ _"], str]:
    """The output head, and its axes: "HV", or "VH" where it is the embedding."""
    return (params.embedding, "VH") if params.head is None else (params.head, "HV")


def check_step(
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Annotated[KVCache, "B = C"],
    num_layers: int,
    slot: jax.Array | None = None,
) -> None:
    """Refuse tokens and positions [B, S] and a cache that cannot belong together; when traced."""
    if tokens.ndim != 2 or tokens.shape != positions.shape:
        raise ValueError(
            f"tokens and positions must both be [B, S]: {tokens.shape} and {positions.shape}"
        )
    b, length = tokens.shape[0] if slot is None else cache.k.shape[1], cache.k.shape[2]
    if slot is not None and tokens.shape[0] != 1:
        raise ValueError(f"one slot has one row of tokens [1, S], not {tokens.shape}")
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
    cache: Annotated[KVCache, "B = C"],
    slot: Int32[Array, ""] | None = None,
    *,
    sliding: Sequence[int] = (),
) -> tuple[Float[Array, "B S E"], Annotated[KVCache, "B = C"]]:
    """Run stacked layers, those named in `sliding` as such; `forward` states the contract."""
    num_layers, num_slots, length = cache.k.shape[:3]
    # T is out of bounds and so dropped. A negative index would wrap round instead, and
    # dynamic_update_slice would shift the whole write to make it fit.
    target = jnp.where((positions >= 0) & (positions < length), positions, length)
    if slot is None:
        first, slots = jnp.int32(0), jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    else:
        first, slots = slot, jnp.where(slot < 0, num_slots, slot)[None, None]
    # A padding row sees entry 0 and gets a finite value: a softmax over nothing would be NaN.
    everything = Seen(jnp.zeros_like(positions), jnp.clip(positions, 0, length - 1))
    near = everything
    if config.sliding_window is not None:
        near = Seen(jnp.maximum(everything.last - config.sliding_window + 1, 0), everything.last)
    is_sliding = np.isin(np.arange(num_layers), sliding)

    def body(
        carry: tuple[jax.Array, KVCache], inputs: tuple[dict[str, jax.Array], jax.Array]
    ) -> tuple[tuple[jax.Array, KVCache], None]:
        x, cache = carry
        stacked, index = inputs
        layer = of_layer(stacked, layers, index)
        # A plain bool where all layers are of one kind: then nothing is selected.
        slides: Slides = bool(is_sliding[0])
        seen = near if slides else everything
        if is_sliding.any() != is_sliding.all():
            slides = jnp.asarray(is_sliding)[index]
            seen = Seen(jnp.where(slides, near.first, everything.first), everything.last)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KVCache]:
            written = _write(cache, index, slots, target, k, v)
            attended = cached_attention if config.row_tile is None else attention_in_tiles
            return attended(config, q, written, (index, first), seen), written

        return decoder_layer(layer, config, x, positions, attend, slides), None

    # The cache is carried, not mapped over: a scan's outputs would be a second cache.
    indices = jnp.arange(num_layers, dtype=jnp.int32)
    (x, cache), _ = lax.scan(body, (x, cache), (stacks_of(layers), indices))
    return x, cache


def _write(
    cache: Annotated[KVCache, "B = C"],
    layer: jax.Array,
    slots: Int32[Array, "B 1"],
    target: Int32[Array, "B S"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
) -> Annotated[KVCache, "B = C"]:
    """Put one layer's keys and values at the positions `target`; those from T on are dropped."""
    k, v = _contain_non_finite(k, v)
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
    slides: Slides = False,
) -> tuple[Float[Array, "B S E"], Aux]:
    """Run one layer: attention, then the feed-forward part, each added to its input.

    `attend` gets the rotated q [B, S, H, Dh] and k [B, S, G, Dh], and v [B, S, G, Dh]. It returns
    [B, S, H * Dh] and anything else, which is passed on. So decoding (which writes a cache) and
    training (which has none) share this code. `slides` selects a sliding layer's rotary base.
    """

    def before(x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        return _heads(layer, config, norm(config, x, layer.attention_norm), positions, slides)

    def behind(x: jax.Array, mixed: jax.Array) -> jax.Array:
        mixed = matmul(mixed, layer.output, layer.output_bias)
        x = x + norm(config, mixed, layer.attention_post_norm)
        normed = norm(config, x, layer.mlp_norm)
        return x + norm(config, _feed_forward(layer, config, normed), layer.mlp_post_norm)

    mixed, aux = attend(*over_rows(before, x, positions, tile=config.row_tiles))
    return over_rows(behind, x, mixed, tile=config.row_tiles), aux


def _feed_forward(
    layer: LayerParams, config: ModelConfig, x: Float[Array, "B S E"]
) -> Float[Array, "B S E"]:
    if config.num_experts:
        return experts(layer, config, x)
    gated = activated(matmul(x, layer.gate), config.activation) * matmul(x, layer.up)
    return matmul(gated, layer.down)


def norm(
    config: ModelConfig, x: Float[Array, "*rows N"], weight: Float[Array, " N"] | None
) -> Float[Array, "*rows N"]:
    """RMSNorm as the configuration has it; None for a weight that the model does not have."""
    if weight is None:
        return x
    in_one_order = config.row_tile is not None
    return rms_norm(x, weight, config.norm_eps, config.norm_plus_one, in_one_order=in_one_order)


def _heads(
    layer: LayerParams,
    config: ModelConfig,
    x: Float[Array, "B S E"],
    positions: Int32[Array, "B S"],
    slides: Slides,
) -> tuple[Float[Array, "B S H Dh"], Float[Array, "B S G Dh"], Float[Array, "B S G Dh"]]:
    """Queries and keys, normed where the model does so and rotated, and values."""
    b, s, _ = x.shape
    q = matmul(x, layer.query, layer.query_bias).reshape(b, s, config.num_heads, config.head_dim)
    k, v = (
        matmul(x, w, bias).reshape(b, s, config.num_kv_heads, config.head_dim)
        for w, bias in ((layer.key, layer.key_bias), (layer.value, layer.value_bias))
    )
    q, k = norm(config, q, layer.query_norm), norm(config, k, layer.key_norm)
    turn = layer_rotation(config, slides)
    return rotary(q, positions, *turn), rotary(k, positions, *turn), v


def embed(
    params: ModelParams, config: ModelConfig, tokens: Int32[Array, "*rows"]
) -> Float[Array, "*rows E"]:
    """Embeddings of tokens.

    An id from V on gives NaN, so that its row is reported as invalid instead of being guessed.
    """
    if config.vocab_padding:
        tokens = jnp.where(tokens < config.vocab_size, tokens, config.num_columns)
    rows = params.embedding.at[tokens].get(mode="fill", fill_value=jnp.nan)
    rows = rows.astype(jnp.dtype(config.dtype))
    return (
        rows * jnp.asarray(config.hidden_size**0.5, rows.dtype) if config.scale_embedding else rows
    )
