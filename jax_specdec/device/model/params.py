"""The weights and the cache of a model, as pytrees.

Axis letters are those of `llama.py`, with Q = H * Dh and KV = G * Dh for the widths of queries and
of keys or values. `...` is the leading axis of layers; a layer taken out of its stack has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.layer_weights import WeightOfLayers
from jax_specdec.device.model.tiles import whole_tiles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """Decoder layers, stacked in `ModelParams`; None for a weight that the model does not have.

    Matrices map inputs to outputs: `y = x @ w`.
    """

    attention_norm: Float[Array, "... E"]
    query: Float[Array, "... E Q"] | WeightOfLayers
    key: Float[Array, "... E KV"] | WeightOfLayers
    value: Float[Array, "... E KV"] | WeightOfLayers
    output: Float[Array, "... Q E"] | WeightOfLayers
    mlp_norm: Float[Array, "... E"]
    gate: Float[Array, "... E F"] | WeightOfLayers  # of experts: [..., X, E, F]
    up: Float[Array, "... E F"] | WeightOfLayers
    down: Float[Array, "... F E"] | WeightOfLayers
    query_bias: Float[Array, "... Q"] | None = None
    key_bias: Float[Array, "... KV"] | None = None
    value_bias: Float[Array, "... KV"] | None = None
    output_bias: Float[Array, "... E"] | None = None
    query_norm: Float[Array, "... Dh"] | None = None
    key_norm: Float[Array, "... Dh"] | None = None
    attention_post_norm: Float[Array, "... E"] | None = None  # of what attention returns
    mlp_post_norm: Float[Array, "... E"] | None = None
    router: Float[Array, "... E X"] | None = None  # which experts a row goes to


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MtpParams:
    """The multi-token prediction head: see `mtp.py`. It shares embedding and output head."""

    hidden_norm: Float[Array, " E"]
    token_norm: Float[Array, " E"]
    projection: Float[Array, "2*E E"]  # its first E rows are for the hidden state
    layers: LayerParams  # a stack of one layer
    final_norm: Float[Array, " E"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelParams:
    """All weights of a model."""

    embedding: Float[Array, "V E"]  # V counts padding too (`ModelConfig.vocab_padding`)
    layers: LayerParams  # a stack of L layers
    final_norm: Float[Array, " E"]
    head: Float[Array, "E V"] | None  # None: the embedding, transposed
    mtp: MtpParams | None
    draft: Any = None  # `ModelParams` of a smaller model that drafts (`drafting.DraftModel`)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every slot, as a value: a function takes one and returns another.

    An entry is a function of its slot's tokens up to its own position. Nothing is ever erased:
    see `llama.forward` for why stale entries are harmless.
    """

    k: Float[Array, "L B T G Dh"]  # rotated
    v: Float[Array, "L B T G Dh"]


Normal = Callable[..., jax.Array]  # (shape, fan_in, scale=1.0) -> random weights


def init_params(config: ModelConfig, key: jax.Array) -> ModelParams:
    """Random weights in `config.dtype`: normal with variance 1/fan-in, norms 1 and biases 0.

    `key` is one key, shape []. The matrices that write into the residual stream are smaller by
    sqrt(2 L), as in GPT-2.
    """
    dtype, size = jnp.dtype(config.dtype), config.hidden_size
    keys = iter(jax.random.split(key, 20))

    def normal(shape: tuple[int, ...], fan_in: int, scale: float = 1.0) -> jax.Array:
        values = jax.random.normal(next(keys), shape, jnp.float32) * (scale / math.sqrt(fan_in))
        return values.astype(dtype)

    # The order of these calls is the order of the random keys: another one makes other weights.
    mtp = None
    if config.num_mtp_layers:
        mtp = MtpParams(
            hidden_norm=neutral_norm(config, (size,)),
            token_norm=neutral_norm(config, (size,)),
            projection=normal((2 * size, size), 2 * size),
            layers=_init_layers(config, 1, normal),
            final_norm=neutral_norm(config, (size,)),
        )
    return ModelParams(
        embedding=normal((config.num_columns, size), size),
        layers=_init_layers(config, config.num_layers, normal),
        final_norm=neutral_norm(config, (size,)),
        head=None if config.tie_embeddings else normal((size, config.num_columns), size),
        mtp=mtp,
    )


def neutral_norm(config: ModelConfig, shape: tuple[int, ...]) -> jax.Array:
    """Weights of norms that change nothing but the scale."""
    return jnp.full(shape, 0 if config.norm_plus_one else 1, jnp.dtype(config.dtype))


def _init_layers(config: ModelConfig, n: int, normal: Normal) -> LayerParams:
    """A stack of n layers."""
    dtype = jnp.dtype(config.dtype)
    e, f = config.hidden_size, config.intermediate_size
    lead_shape = (n, config.num_experts) if config.num_experts else (n,)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    residual = 1.0 / math.sqrt(2 * config.num_layers)

    def bias(size: int, has: bool) -> jax.Array | None:
        return jnp.zeros((n, size), dtype) if has else None

    def optional_norm(size: int, has: bool) -> jax.Array | None:
        return neutral_norm(config, (n, size)) if has else None

    return LayerParams(
        attention_norm=neutral_norm(config, (n, e)),
        query=normal((n, e, q), e),
        key=normal((n, e, kv), e),
        value=normal((n, e, kv), e),
        output=normal((n, q, e), q, residual),
        mlp_norm=neutral_norm(config, (n, e)),
        gate=normal((*lead_shape, e, f), e),
        up=normal((*lead_shape, e, f), e),
        down=normal((*lead_shape, f, e), f, residual),
        query_bias=bias(q, config.qkv_bias),
        key_bias=bias(kv, config.qkv_bias),
        value_bias=bias(kv, config.qkv_bias),
        output_bias=bias(e, config.output_bias),
        query_norm=optional_norm(config.head_dim, config.qk_norm),
        key_norm=optional_norm(config.head_dim, config.qk_norm),
        attention_post_norm=optional_norm(e, config.post_norms),
        mlp_post_norm=optional_norm(e, config.post_norms),
        router=normal((n, e, config.num_experts), e) if config.num_experts else None,
    )


def named_arrays(params: Any) -> dict[str, Any]:
    """The arrays of a model's weights by dotted path, such as "layers.query", in tree order.

    Args:
      params: `ModelParams`, the weights of a model of your own, or any other tree: of shapes, or of
        what else belongs to each weight.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    name = jax.tree_util.keystr
    return {name(path, simple=True, separator="."): value for path, value in flat}


def init_cache(config: ModelConfig, num_slots: int, length: int) -> KVCache:
    """An empty cache for the decoder: `num_slots` slots of `length` positions each."""
    return _empty_cache(config, config.num_layers, num_slots, length)


def init_mtp_cache(config: ModelConfig, num_slots: int, length: int) -> KVCache:
    """An empty cache for the MTP head (a leading axis of one layer)."""
    if not config.num_mtp_layers:
        raise ValueError(
            "this model has no MTP head (num_mtp_layers = 0), so it needs no cache for one: "
            "choose another drafter"
        )
    return _empty_cache(config, config.num_mtp_layers, num_slots, length)


def _empty_cache(config: ModelConfig, layers: int, num_slots: int, length: int) -> KVCache:
    if num_slots < 1 or length < 1:
        raise ValueError(f"a cache needs at least one slot and position: {num_slots=}, {length=}")
    if config.row_tile is not None:
        length = whole_tiles(length)
    shape = (layers, num_slots, length, config.num_kv_heads, config.head_dim)
    zeros = jnp.zeros(shape, jnp.dtype(config.dtype))
    return KVCache(k=zeros, v=jnp.zeros_like(zeros))
