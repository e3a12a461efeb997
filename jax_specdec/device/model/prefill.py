"""Prefill: run a prompt, or one chunk of it, through one slot of the caches.

A chunk with start > 0 attends to the entries that earlier chunks of its slot left in the cache, so
a long prompt goes through in pieces of one static size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model import llama
from jax_specdec.device.model.mtp import mtp_forward
from jax_specdec.device.model.own_model import Model, OwnModel
from jax_specdec.device.model.params import KVCache, ModelParams

Number = Int32[Array, ""] | int


def prefill(
    params: Any,
    config: Model,
    tokens: Int32[Array, " P"],
    start: Number,
    num_valid: Number,
    slot: Number,
    cache: KVCache,
) -> tuple[Float[Array, "P E"], KVCache]:
    """Run one chunk of one slot's prompt; other slots are untouched.

    Args:
      params, config: of the model.
      tokens: P is a static bucket.
      start: position of tokens[0]; the slot's earlier entries must have been written.
      num_valid: how many tokens count; the rest is padding.
      slot: which slot, 0 <= slot < B. Any other writes nothing and returns NaN.
      cache: the decoder's cache.

    Returns:
      Hidden states (rows from num_valid on mean nothing) and the new cache.
    """

    positions, slot = _positions(tokens, start, num_valid), jnp.asarray(slot, jnp.int32)
    if isinstance(config, ModelConfig):
        out, cache = llama.forward(params, config, tokens[None], positions, cache, slot)
        out = jnp.where((slot >= 0) & (slot < cache.k.shape[1]), out, jnp.nan)
    else:
        out, cache = _in_copied_slot(params, config, tokens, positions, slot, cache)
    return out[0], cache


def mtp_prefill(
    params: ModelParams,
    config: ModelConfig,
    hidden: Float[Array, "P E"],
    next_tokens: Int32[Array, " P"],
    start: Number,
    num_valid: Number,
    slot: Number,
    mtp_cache: KVCache,
) -> tuple[Float[Array, "P E"], KVCache]:
    """Run the MTP head over one chunk of one slot's prompt; see `prefill` and `mtp_forward`.

    Args:
      hidden: from `prefill`.
      next_tokens: the prompt shifted by one; after the last prompt token comes the first
        generated one.

    Returns:
      Hidden states and the new MTP cache.
    """

    positions, slot = _positions(next_tokens, start, num_valid), jnp.asarray(slot, jnp.int32)
    out, mtp_cache = mtp_forward(
        params, config, hidden[None], next_tokens[None], positions, mtp_cache, slot
    )
    return out[0], mtp_cache


def _positions(tokens: jax.Array, start: Number, num_valid: Number) -> jax.Array:
    """[1, P] int32: where the tokens stand; -1 for padding."""
    if tokens.ndim != 1:
        raise ValueError(f"a prefill chunk must be [P]: {tokens.shape}")
    offsets = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    start, num_valid = (jnp.asarray(x, jnp.int32) for x in (start, num_valid))
    return jnp.where(offsets < num_valid, start + offsets, -1)[None]


def _in_copied_slot(
    params: Any,
    model: OwnModel,
    tokens: Int32[Array, " P"],
    positions: Int32[Array, "1 P"],
    slot: Int32[Array, ""],
    cache: KVCache,
) -> tuple[Float[Array, "1 P E"], KVCache]:
    """Run a chunk on the slot's part of the cache, which is then put back."""
    # A negative index would wrap round to another request's slot.
    slot = jnp.where(slot < 0, cache.k.shape[1], slot)
    part = jax.tree.map(
        lambda x: x.at[:, slot].get(mode="fill", fill_value=jnp.nan)[:, None], cache
    )
    out, part = model.forward(params, tokens[None], positions, part)
    return out, jax.tree.map(
        lambda cache_array, slot_array: cache_array.at[:, slot].set(slot_array[:, 0], mode="drop"),
        cache,
        part,
    )
