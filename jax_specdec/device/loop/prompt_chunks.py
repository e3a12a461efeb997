"""Prompts, run a chunk at a time between the steps of other slots, and their logprobs.

A prompt token's row is that of the position before it, so the first token has none, and the last
one's comes with the chunk that ends the prompt.

Axes: B slots, D drafts, P positions of a chunk, E hidden size, W words.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from ipc.wire import Kind, SlotState
from jax_specdec.device.drafting.drafters import Chunk
from jax_specdec.device.loop.prompt_rows import prompt_rows
from jax_specdec.device.loop.state import LoopConfig, LoopState
from jax_specdec.device.messages.batch_options import BatchOptions, Widths
from jax_specdec.device.messages.pack import PackedSlots, SentRows, Stamp, pack
from jax_specdec.device.messages.step_messages import most_words
from jax_specdec.device.model.prefill import prefill
from pallas_kernels import TopkLogprobs
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


class ScoredChunk(NamedTuple):
    """Prompt tokens of a chunk and their logprobs."""

    token_ids: Int32[Array, " P"]
    num: Int32[Array, ""]  # the leading ones, which are sent
    logprobs: TopkLogprobs  # P rows


def score_chunk(
    config: LoopConfig,
    params: Any,
    state: LoopState,
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
    unscored: Int32[Array, ""],
    extra_token_ids: Int32[Array, "P C"],
    options: Annotated[BatchOptions, "B = 1"],
    *,
    chunk: int,
    widths: Widths,
) -> tuple[LoopState, ScoredChunk]:
    """`run_chunk` that also scores the tokens which the chunk's positions predict.

    Args:
      unscored: positions of the chunk before the first whose token is scored.
      extra_token_ids: named for each token that is scored, from the first one on.
      options: of this slot alone: K, mode and the number of chosen ids for its prompt.
      widths: the static limits of `options`.
    """
    state, run = run_chunk(config, params, state, slot, start, chunk)
    hidden, token_ids = (jnp.roll(x, -unscored, axis=0) for x in (run.hidden, run.next_tokens))
    num = jnp.maximum(run.num_valid - unscored, 0)
    results = prompt_rows(config, params, hidden, token_ids, num, extra_token_ids, options, widths)
    return state, ScoredChunk(token_ids, num, results)


def prompt_message(
    scored: ScoredChunk,
    slot: Int32[Array, ""],
    options: Annotated[BatchOptions, "B = 1"],
    generation: UInt32[Array, " B"],
    stamp: Stamp,
    *,
    widths: Widths,
    vocab_size: int,
) -> UInt32[Array, " W"]:
    """The message of one chunk of one slot's prompt, packed: every token in it has logprobs.

    Args:
      scored: the chunk.
      slot: whose prompt it is.
      options: as for `score_chunk`.
      generation: of all slots.
      stamp: with the number of the step before which it is sent.
      widths: the static limits of `options`.
      vocab_size: V.

    Returns:
      The words; see `pack`.
    """
    batch, size = generation.shape[0], scored.token_ids.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)

    def of_slot(value: Int32[Array, ""]) -> Int32[Array, " B"]:
        return zeros.at[slot].set(value)

    index = jnp.arange(size, dtype=jnp.int32)
    slots = PackedSlots(
        state=jnp.full(batch, SlotState.NOTHING, jnp.int32).at[slot].set(SlotState.TOKENS),
        mode=of_slot(options.mode[0]),
        columns=of_slot(options.num_columns[0]),
        num_tokens=of_slot(scored.num),
        num_rows=of_slot(scored.num),
        num_drafts=zeros,
        values=zeros,
        num_chosen=of_slot(options.num_chosen[0]),
        kept=zeros,
        generation=generation,
    )
    return pack(
        slots,
        jnp.zeros((batch, size), jnp.int32).at[slot].set(scored.token_ids),
        SentRows(jnp.where(index < scored.num, slot * size + index, batch * size), scored.num),
        scored.logprobs,
        stamp,
        kind=Kind.PROMPT,
        running=jnp.bool_(True),
        draft_follows=False,
        vocab_size=vocab_size,
        num_words=most_words(1, size, widths, vocab_size)
        + most_words(batch - 1, 0, Widths(), vocab_size),
    )
