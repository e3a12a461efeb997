"""Prompts, run a chunk at a time between the steps of other slots.

Axes: B slots, D drafts, P positions of a chunk, E hidden size.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jax_specdec.device.drafting.drafters import Chunk
from jax_specdec.device.loop.state import LoopConfig, LoopState
from jax_specdec.device.model.prefill import prefill
from pallas_kernels.sampling import CompactQ, Drafts


def prefill_chunk(
    config: LoopConfig,
    params: Any,
    state: LoopState,
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
    chunk: int,
) -> LoopState:
    """`run_chunk` for a prompt whose logprobs are not wanted."""
    return run_chunk(config, params, state, slot, start, chunk)[0]


def run_chunk(
    config: LoopConfig,
    params: Any,
    state: LoopState,
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
    chunk: int,
) -> tuple[LoopState, Chunk]:
    """Run prompt tokens `start` to `start + chunk` of `slot` through the caches.

    All but the last prompt token: that one is row 0 of the slot's first step, so the first token
    is emitted like any other. The chunk that reaches it makes the slot active.
    """
    length = state.lengths[slot]
    num_valid = jnp.clip(length - 1 - start, 0, chunk)
    places = start + jnp.arange(chunk + 1, dtype=jnp.int32)
    tokens = state.tokens.at[slot, places].get(mode="fill", fill_value=0)
    hidden, cache = prefill(params, config.model, tokens[:-1], start, num_valid, slot, state.cache)
    run = Chunk(hidden, tokens[:-1], tokens[1:], start, num_valid, slot)
    drafter = config.drafter.prefill(params, state.drafter, run)
    done = start + chunk >= length - 1
    # Not at the admission: every step until now has replaced the drafts of all slots.
    drafts, certain = _first_drafts(state, slot)
    state = state._replace(
        drafts=drafts,
        certain=certain,
        cache=cache,
        drafter=drafter,
        active=state.active.at[slot].set(done & state.prefilling[slot]),
        prefilling=state.prefilling.at[slot].set(state.prefilling[slot] & ~done),
    )
    return state, run


def _first_drafts(state: LoopState, slot: Int32[Array, ""]) -> tuple[Drafts, Bool[Array, " B"]]:
    """The drafts and `LoopState.certain` with what was handed over to `slot`."""
    ids = state.handed_over[slot]
    drafts = Drafts(
        state.drafts.token_ids.at[slot].set(jnp.maximum(ids, 0)),
        state.drafts.num.at[slot].set((ids >= 0).sum(dtype=jnp.int32)),
        state.drafts.q,
        state.drafts.report,
    )
    if isinstance(drafts.q, CompactQ):  # as a drawn draft's, but with one token
        first = jnp.arange(drafts.q.ids.shape[-1], dtype=jnp.int32)[None] == 0
        q = CompactQ(
            drafts.q.ids.at[slot].set(jnp.where(first, ids[:, None], -1)),
            drafts.q.logprobs.at[slot].set(jnp.where(first, 0.0, -jnp.inf)),
        )
        drafts = drafts._replace(q=q)
    return drafts, state.certain.at[slot].set((ids >= 0).any())
