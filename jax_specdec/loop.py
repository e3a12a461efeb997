"""The decoding loop on the device: its state, and the pure functions that move it one step.

``admit`` puts a request into a slot, ``prefill_chunk`` runs its prompt, ``step`` verifies the
drafts of every slot and proposes the next ones, ``message`` turns what a step emitted into the
words that travel to the engine. Each is a function of the state and of small host values, so the
host launches step n + 1 without having seen step n.

Axes: B slots, S = D + 1 positions, D drafts, T tokens of a slot, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.drafters import Context, Drafter
from jax_specdec.model import KVCache, ModelConfig, ModelParams, forward, init_cache, logits
from jax_specdec.pack import Rows, SlotFields, pack, select_rows
from jax_specdec.prefill import prefill
from jax_specdec.sampling import Sampling
from jax_specdec.verify import AcceptRule, Drafts, accept_draft, verify
from pallas_kernels import Greedy, TopkLogprobs, greedy_topk_logprobs, topk_logprobs

MAX_STOP_IDS = 8  # stop token ids of a request that the device watches for


@dataclass(frozen=True)
class LoopConfig:
    """The static part of a loop; hashable."""

    model: ModelConfig
    drafter: Drafter
    num_slots: int  # B
    max_length: int  # T: prompt and emitted tokens of a request
    accept: AcceptRule = accept_draft

    @property
    def num_positions(self) -> int:
        return self.drafter.num_drafts + 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopState:
    """Everything that a step reads and changes.

    The last known token of a slot, at `lengths - 1`, is not in the cache yet: it is row 0 of the
    slot's next step.
    """

    cache: KVCache
    drafter: Any
    drafts: Drafts
    tokens: jax.Array  # [B, T] int32: prompt and emitted tokens
    lengths: jax.Array  # [B] int32: known tokens
    active: jax.Array  # [B] bool: decoding
    prefilling: jax.Array  # [B] bool: admitted, prompt not yet through
    remaining: jax.Array  # [B] int32: tokens that may still be emitted
    max_drafts: jax.Array  # [B] int32
    stop_ids: jax.Array  # [B, MAX_STOP_IDS] int32, -1 where unused
    sampling: Sampling


class Admission(NamedTuple):
    """One request, as arrays; `requests` holds the meaning of each value."""

    tokens: jax.Array  # [T] int32: the prompt, padded
    length: jax.Array  # [] int32
    max_tokens: jax.Array  # [] int32
    max_drafts: jax.Array  # [] int32
    stop_ids: jax.Array  # [MAX_STOP_IDS] int32, -1 where unused
    sampling: Sampling  # of scalars


class StepOutput(NamedTuple):
    """What one step emitted, still on the device."""

    logits: jax.Array  # [B, S, V]: the target's
    token_ids: jax.Array  # [B, S] int32
    num_tokens: jax.Array  # [B] int32
    num_drafts: jax.Array  # [B] int32: verified in this step
    state: jax.Array  # [B] int32 SlotState
    running: jax.Array  # [] bool: some slot goes on after this step
    greedy_rows: TopkLogprobs | None  # of all B * S rows' greedy choices, on the fused path


def init_state(config: LoopConfig) -> LoopState:
    """B empty slots."""
    batch, length = config.num_slots, config.max_length
    drafts, drafter = config.drafter.init(batch, length)
    state = LoopState(
        cache=init_cache(config.model, batch, length),
        drafter=drafter,
        drafts=drafts,
        tokens=jnp.zeros((batch, length), jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        active=jnp.zeros(batch, bool),
        prefilling=jnp.zeros(batch, bool),
        remaining=jnp.zeros(batch, jnp.int32),
        max_drafts=jnp.zeros(batch, jnp.int32),
        stop_ids=jnp.full((batch, MAX_STOP_IDS), -1, jnp.int32),
        sampling=Sampling.greedy(batch),
    )
    # No two leaves may share a buffer: the state is donated to the next step.
    distinct: LoopState = jax.tree.map(jnp.copy, state)
    return distinct


def admit(state: LoopState, slot: jax.Array, request: Admission) -> LoopState:
    """Put `request` into `slot`, whatever was there before; its prompt still has to be run."""

    def put(whole: jax.Array, one: jax.Array) -> jax.Array:
        return whole.at[slot].set(one)

    return replace(
        state,
        tokens=put(state.tokens, request.tokens),
        lengths=put(state.lengths, request.length),
        active=state.active.at[slot].set(False),
        prefilling=state.prefilling.at[slot].set(True),
        remaining=put(state.remaining, request.max_tokens),
        max_drafts=put(state.max_drafts, request.max_drafts),
        stop_ids=put(state.stop_ids, request.stop_ids),
        sampling=jax.tree.map(put, state.sampling, request.sampling),
        drafts=state.drafts._replace(num=state.drafts.num.at[slot].set(0)),
    )


def release(state: LoopState, slot: jax.Array) -> LoopState:
    """Stop whatever runs in `slot`."""
    return replace(
        state,
        active=state.active.at[slot].set(False),
        prefilling=state.prefilling.at[slot].set(False),
    )


def prefill_chunk(
    config: LoopConfig,
    params: ModelParams,
    state: LoopState,
    slot: jax.Array,
    start: jax.Array,
    chunk: int,
) -> LoopState:
    """Run prompt tokens `start` to `start + chunk` of `slot` through the caches.

    All but the last prompt token: that one is row 0 of the slot's first step, so the first token
    is emitted like any other. The chunk that reaches it makes the slot active.
    """
    length = state.lengths[slot]
    num_valid = jnp.clip(length - 1 - start, 0, chunk)
    places = start + jnp.arange(chunk + 1, dtype=jnp.int32)
    tokens = state.tokens.at[slot, places].get(mode="fill", fill_value=0)
    hidden, cache = prefill(params, config.model, tokens[:-1], start, num_valid, slot, state.cache)
    drafter = config.drafter.prefill(
        params, state.drafter, hidden, tokens[1:], start, num_valid, slot
    )
    done = start + chunk >= length - 1
    return replace(
        state,
        cache=cache,
        drafter=drafter,
        active=state.active.at[slot].set(done & state.prefilling[slot]),
        prefilling=state.prefilling.at[slot].set(state.prefilling[slot] & ~done),
    )


def step(
    config: LoopConfig, params: ModelParams, state: LoopState, *, fused_k: int | None = None
) -> tuple[LoopState, StepOutput]:
    """Verify every active slot's drafts, emit tokens, and draft the next ones.

    With `fused_k`, one read of the target's logits serves the greedy choice and the logprobs (up
    to that static K) of every row: the cheaper path where a kernel can do it, where every slot is
    greedy, and where most rows' logprobs are wanted. Otherwise `message` reads the accepted rows
    that were asked for.
    """
    batch, num_positions = config.num_slots, config.num_positions
    slots = jnp.arange(batch, dtype=jnp.int32)[:, None]
    index = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
    drafts = state.drafts
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)
    inputs = jnp.concatenate([last, drafts.token_ids], axis=1)
    places = state.lengths[:, None] - 1 + index
    is_row = state.active[:, None] & (index <= drafts.num[:, None])
    hidden, cache = forward(
        params, config.model, inputs, jnp.where(is_row, places, -1), state.cache
    )
    target = logits(params, config.model, hidden)
    greedy_rows, choice = None, None
    if fused_k is not None:
        greedy_rows = greedy_topk_logprobs(target.reshape(-1, target.shape[-1]), fused_k)
        choice = Greedy(greedy_rows.token_ids[:, 0], greedy_rows.token_ranks > 0)
    # What an empty slot's last request asked for must not put a greedy batch on the sampled path.
    temperature = jnp.where(state.active, state.sampling.temperature, 0.0)
    sampling = state.sampling._replace(temperature=temperature)
    verified = verify(target, drafts, sampling, state.lengths, accept=config.accept, choice=choice)
    num_tokens = jnp.where(state.active, verified.num_tokens, 0)

    emitted = index < num_tokens[:, None]
    where = jnp.where(emitted, places + 1, config.max_length)
    tokens = state.tokens.at[slots, where].set(verified.token_ids, mode="drop")
    lengths = state.lengths + num_tokens
    remaining = state.remaining - num_tokens
    is_stop = (verified.token_ids[:, :, None] == state.stop_ids[:, None, :]).any(-1)
    active = state.active & ~(is_stop & emitted).any(-1) & (remaining > 0)
    # A draft beyond the length limit could only be cut: it is not made.
    limit = jnp.minimum(state.max_drafts, jnp.minimum(remaining, config.max_length - lengths) - 1)
    context = Context(
        tokens=tokens,
        lengths=lengths,
        verified=verified._replace(num_tokens=num_tokens),
        num_drafts=jnp.where(state.active, drafts.num, 0),
        hidden=hidden,
        positions=jnp.where(emitted, places, -1),
        sampling=sampling,
        limit=jnp.where(active, jnp.maximum(limit, 0), 0),
    )
    proposed, drafter = config.drafter.propose(params, state.drafter, context)
    proposed = proposed._replace(num=jnp.clip(proposed.num, 0, context.limit))
    slot_state = jnp.where(
        state.active,
        SlotState.TOKENS,
        jnp.where(state.prefilling, SlotState.NOTHING, SlotState.STOPPED),
    )
    output = StepOutput(
        logits=target,
        token_ids=verified.token_ids,
        num_tokens=num_tokens,
        num_drafts=context.num_drafts,
        state=slot_state.astype(jnp.int32),
        running=jnp.any(active | state.prefilling),
        greedy_rows=greedy_rows,
    )
    state = replace(
        state,
        cache=cache,
        drafter=drafter,
        drafts=proposed,
        tokens=tokens,
        lengths=lengths,
        active=active,
        remaining=remaining,
    )
    return state, output


def message(
    output: StepOutput,
    columns: jax.Array,
    generation: jax.Array,
    step_number: jax.Array,
    *,
    k: int | None,
    num_words: int,
    process_rank: int = 0,
) -> jax.Array:
    """The target message of a step, packed.

    Args:
      output: of the step.
      columns: [B] int32: 0 for no logprobs, K + 1 otherwise, as when the step was launched.
      generation: [B] uint32, as when the step was launched.
      step_number: [2] uint32, low and high half.
      k: the static K that covers every slot, or None where nobody asked for logprobs: then no
        kernel runs.
      num_words: the bucket, from the host's bound.

    Returns:
      [num_words] uint32; see `pack`.
    """
    batch, num_positions, vocab = output.logits.shape
    num_rows = jnp.where(columns > 0, output.num_tokens, 0)
    if k is None:
        nothing = jnp.zeros(0, jnp.int32)
        rows = Rows(nothing, jnp.int32(0))
        empty = jnp.zeros((0, 1), jnp.int32)
        found = TopkLogprobs(empty, jnp.zeros((0, 1)), nothing, jnp.zeros((0, 0)))
    elif output.greedy_rows is not None:
        # A greedy request's emitted tokens are its rows' greedy choices, accepted drafts included.
        rows = select_rows(num_rows, num_positions)
        found = jax.tree.map(
            lambda x: x.at[rows.flat].get(mode="fill", fill_value=0), output.greedy_rows
        )
    else:
        rows = select_rows(num_rows, num_positions)
        flat_ids = output.token_ids.reshape(-1)
        found = topk_logprobs(
            output.logits.reshape(-1, vocab),
            flat_ids.at[rows.flat].get(mode="fill", fill_value=-1),
            k,
            row_ids=rows.flat,
            num_rows=rows.num,
        )
    slots = SlotFields(
        state=output.state,
        mode=jnp.full(batch, LogprobsMode.RAW, jnp.int32),
        columns=columns,
        num_tokens=output.num_tokens,
        num_rows=num_rows,
        num_drafts=output.num_drafts,
        num_chosen=jnp.zeros(batch, jnp.int32),
        generation=generation,
    )
    return pack(
        slots,
        output.token_ids,
        rows,
        found,
        kind=Kind.TARGET,
        step=step_number,
        running=output.running,
        draft_follows=False,
        process_rank=process_rank,
        vocab_size=vocab,
        num_words=num_words,
    )
