"""Logprobs of a prompt's own tokens, a chunk at a time, while the prompt is run.

A prompt token's row is that of the position before it, so the first token has none, and the last
one's comes with the chunk that ends the prompt.

Axes: B slots, P positions of a chunk, W words.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from ipc.wire import Kind, SlotState
from jax_specdec.device.loop.prompt_chunks import run_chunk
from jax_specdec.device.loop.prompt_rows import prompt_rows
from jax_specdec.device.loop.state import LoopConfig, LoopState
from jax_specdec.device.messages.batch_options import BatchOptions, Widths
from jax_specdec.device.messages.pack import Rows, SlotFields, pack
from jax_specdec.device.messages.step_messages import most_words
from pallas_kernels import TopkLogprobs


class ScoredChunk(NamedTuple):
    """Prompt tokens of a chunk and their logprobs."""

    token_ids: Int32[Array, " P"]
    num: Int32[Array, ""]  # the leading ones, which are the prompt's
    logprobs: TopkLogprobs  # P rows


def score_chunk(
    config: LoopConfig,
    params: Any,
    state: LoopState,
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
    options: Annotated[BatchOptions, "B = 1"],
    *,
    chunk: int,
    widths: Widths,
) -> tuple[LoopState, ScoredChunk]:
    """`run_chunk` that also scores the tokens which the chunk's positions predict.

    Args:
      options: of this slot alone: K, mode and chosen ids for its prompt.
      widths: the static limits of `options`.
    """
    state, run = run_chunk(config, params, state, slot, start, chunk)
    found = prompt_rows(config, params, run.hidden, run.next_tokens, run.num_valid, options, widths)
    return state, ScoredChunk(run.next_tokens, run.num_valid, found)


def prompt_message(
    scored: ScoredChunk,
    slot: Int32[Array, ""],
    options: Annotated[BatchOptions, "B = 1"],
    generation: UInt32[Array, " B"],
    step_number: UInt32[Array, "2"],
    *,
    widths: Widths,
    vocab_size: int,
    process_rank: int = 0,
    weights_version: UInt32[Array, ""] | int = 0,
    digest: int = 0,
) -> UInt32[Array, " W"]:
    """The message of one chunk of one slot's prompt, packed: every token in it has logprobs.

    Args:
      scored: the chunk.
      slot: whose prompt it is.
      options: as for `score_chunk`.
      generation: of all slots.
      step_number: low and high half, of the step before which it is sent.
      widths: the static limits of `options`.
      vocab_size: V.
      process_rank: which process rank sends.
      weights_version: of the weights that the chunk was run with.
      digest: static, of what the rows' bits depend on.

    Returns:
      The words; see `pack`.
    """
    batch, size = generation.shape[0], scored.token_ids.shape[0]
    nothing = jnp.zeros(batch, jnp.int32)

    def of_slot(value: Int32[Array, ""]) -> Int32[Array, " B"]:
        return nothing.at[slot].set(value)

    index = jnp.arange(size, dtype=jnp.int32)
    slots = SlotFields(
        state=jnp.full(batch, SlotState.NOTHING, jnp.int32).at[slot].set(SlotState.TOKENS),
        mode=of_slot(options.mode[0]),
        columns=of_slot(options.num_columns[0]),
        num_tokens=of_slot(scored.num),
        num_rows=of_slot(scored.num),
        num_drafts=nothing,
        num_chosen=of_slot(options.num_chosen[0]),
        kept=nothing,
        generation=generation,
    )
    return pack(
        slots,
        jnp.zeros((batch, size), jnp.int32).at[slot].set(scored.token_ids),
        Rows(jnp.where(index < scored.num, slot * size + index, batch * size), scored.num),
        scored.logprobs,
        kind=Kind.PROMPT,
        step=step_number,
        running=jnp.bool_(True),
        draft_follows=False,
        process_rank=process_rank,
        weights_version=weights_version,
        digest=digest,
        vocab_size=vocab_size,
        num_words=most_words(1, size, widths, vocab_size)
        + most_words(batch - 1, 0, Widths(), vocab_size),
    )
