"""The weights and the cache of a model, as pytrees; axis letters as in `model.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_specdec.checkpoint.model_config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """One decoder layer; in `ModelParams` every array has a leading axis of layers.

    Matrices map inputs to outputs: `y = x @ w`. What a model does not have is None.
    """

    attention_norm: jax.Array  # [D]
    query: jax.Array  # [D, H*Dh]
    key: jax.Array  # [D, KVH*Dh]
    value: jax.Array  # [D, KVH*Dh]
    output: jax.Array  # [H*Dh, D]
    mlp_norm: jax.Array  # [D]
    gate: jax.Array  # [D, F]
    up: jax.Array  # [D, F]
    down: jax.Array  # [F, D]
    query_bias: jax.Array | None = None  # [H*Dh]
    key_bias: jax.Array | None = None  # [KVH*Dh]
    value_bias: jax.Array | None = None  # [KVH*Dh]
    output_bias: jax.Array | None = None  # [D]
    query_norm: jax.Array | None = None  # [Dh]
    key_norm: jax.Array | None = None  # [Dh]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MtpParams:
    """The multi-token prediction head: see `mtp.py`. It shares embedding and output head."""

    hidden_norm: jax.Array  # [D]
    token_norm: jax.Array  # [D]
    projection: jax.Array  # [2*D, D], rows 0..D-1 for the hidden state, D..2D-1 for the token
    layers: LayerParams  # stacked, one layer
    final_norm: jax.Array  # [D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelParams:
    """All weights of a model."""

    embedding: jax.Array  # [V, D]
    layers: LayerParams  # stacked [L, ...]
    final_norm: jax.Array  # [D]
    head: jax.Array | None  # [D, V]; None: the embedding, transposed
    mtp: MtpParams | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every slot, as a value: a function takes one and returns another.

    An entry is a function of its slot's tokens up to its own position. Nothing is ever erased:
    see `forward` for why stale entries are harmless.
    """

    k: jax.Array  # [L, B, T, KVH, Dh], rotated
    v: jax.Array  # [L, B, T, KVH, Dh]


def init_params(config: ModelConfig, key: jax.Array) -> ModelParams:
    """Random weights in `config.dtype`: normal with variance 1/fan-in, norms 1 and biases 0.

    The matrices that write into the residual stream are smaller by sqrt(2 L), as in GPT-2.
    """
    dtype = jnp.dtype(config.dtype)
    d, f, layers = config.hidden_size, config.intermediate_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    residual = 1.0 / math.sqrt(2 * layers)
    keys = iter(jax.random.split(key, 18))

    def normal(shape: tuple[int, ...], fan_in: int, scale: float = 1.0) -> jax.Array:
        values = jax.random.normal(next(keys), shape, jnp.float32) * (scale / math.sqrt(fan_in))
        return values.astype(dtype)

    def bias(n: int, size: int, has: bool) -> jax.Array | None:
        return jnp.zeros((n, size), dtype) if has else None

    def norm(n: int, has: bool) -> jax.Array | None:
        return jnp.ones((n, config.head_dim), dtype) if has else None

    def stack(n: int) -> LayerParams:
        return LayerParams(
            attention_norm=jnp.ones((n, d), dtype),
            query=normal((n, d, q), d),
            key=normal((n, d, kv), d),
            value=normal((n, d, kv), d),
            output=normal((n, q, d), q, residual),
            mlp_norm=jnp.ones((n, d), dtype),
            gate=normal((n, d, f), d),
            up=normal((n, d, f), d),
            down=normal((n, f, d), f, residual),
            query_bias=bias(n, q, config.qkv_bias),
            key_bias=bias(n, kv, config.qkv_bias),
            value_bias=bias(n, kv, config.qkv_bias),
            output_bias=bias(n, d, config.output_bias),
            query_norm=norm(n, config.qk_norm),
            key_norm=norm(n, config.qk_norm),
        )

    mtp = None
    if config.num_mtp_layers:
        mtp = MtpParams(
            hidden_norm=jnp.ones((d,), dtype),
            token_norm=jnp.ones((d,), dtype),
            projection=normal((2 * d, d), 2 * d),
            layers=stack(1),
            final_norm=jnp.ones((d,), dtype),
        )
    return ModelParams(
        embedding=normal((config.vocab_size, d), d),
        layers=stack(layers),
        final_norm=jnp.ones((d,), dtype),
        head=None if config.tie_embeddings else normal((d, config.vocab_size), d),
        mtp=mtp,
    )


def named_arrays(params: ModelParams) -> dict[str, jax.Array]:
    """The arrays of params by dotted path, in tree order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(key.name for key in path): value for path, value in flat}


def init_cache(config: ModelConfig, num_slots: int, length: int) -> KVCache:
    """An empty cache for the decoder: `num_slots` slots of `length` positions each."""
    return _empty_cache(config, config.num_layers, num_slots, length)


def init_mtp_cache(config: ModelConfig, num_slots: int, length: int) -> KVCache:
    """An empty cache for the MTP head (a leading axis of one layer)."""
    if not config.num_mtp_layers:
        raise ValueError("this model has no MTP head (num_mtp_layers=0), so it needs no MTP cache")
    return _empty_cache(config, config.num_mtp_layers, num_slots, length)


def _empty_cache(config: ModelConfig, layers: int, num_slots: int, length: int) -> KVCache:
    if num_slots < 1 or length < 1:
        raise ValueError(f"a cache needs at least one slot and position: {num_slots=}, {length=}")
    shape = (layers, num_slots, length, config.num_kv_heads, config.head_dim)
    zeros = jnp.zeros(shape, jnp.dtype(config.dtype))
    return KVCache(k=zeros, v=jnp.zeros_like(zeros))
