"""The decoding loop on the device: the pure functions that move its state one step.

``admit`` puts a request into a slot, ``prefill_chunk`` runs its prompt, ``step`` verifies the
drafts of every slot and proposes the next ones; `messages` turns what a step emitted into the
words that travel to the engine. Each is a function of the state and of small host values, so the
host launches step n + 1 without having seen step n.

Axes: B slots, S = D + 1 positions, D drafts, T tokens of a slot, V vocabulary.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ipc.wire import SlotState
from jax_specdec.device.drafting.drafters import Context
from jax_specdec.device.loop.state import LoopConfig, LoopState
from jax_specdec.device.messages.step_messages import StepOutput, step_output
from jax_specdec.device.model.llama import forward, logits
from jax_specdec.device.model.params import ModelParams
from jax_specdec.device.model.prefill import prefill
from jax_specdec.device.sampling.distribution import Truncation
from jax_specdec.device.sampling.verify import Drafts, verify
from pallas_kernels import Greedy, greedy_topk_logprobs


class Chunk(NamedTuple):
    """A chunk of a prompt that was run. Axes: P positions, H hidden."""

    hidden: jax.Array  # [P, H]: the decoder's; position p predicts the next token
    next_tokens: jax.Array  # [P] int32
    num_valid: jax.Array  # [] int32: the rest is padding


def prefill_chunk(
    config: LoopConfig,
    params: ModelParams,
    state: LoopState,
    slot: jax.Array,
    start: jax.Array,
    chunk: int,
) -> LoopState:
    """As `run_chunk`, for a prompt whose logprobs nobody wants."""
    return run_chunk(config, params, state, slot, start, chunk)[0]


def run_chunk(
    config: LoopConfig,
    params: ModelParams,
    state: LoopState,
    slot: jax.Array,
    start: jax.Array,
    chunk: int,
) -> tuple[LoopState, Chunk]:
    """Run prompt tokens `start` to `start + chunk` of `slot` (both [] int32) through the caches.

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
    # Not at the admission: every step until now has replaced the drafts of all slots.
    drafts, certain = _first_drafts(state, slot)
    state = replace(
        state,
        drafts=drafts,
        certain=certain,
        cache=cache,
        drafter=drafter,
        active=state.active.at[slot].set(done & state.prefilling[slot]),
        prefilling=state.prefilling.at[slot].set(state.prefilling[slot] & ~done),
    )
    return state, Chunk(hidden, tokens[1:], num_valid)


def _first_drafts(state: LoopState, slot: jax.Array) -> tuple[Drafts, jax.Array]:
    """The drafts and `LoopState.certain` with what was handed over to `slot`."""
    ids = state.handed_over[slot]
    drafts = Drafts(
        state.drafts.token_ids.at[slot].set(jnp.maximum(ids, 0)),
        state.drafts.num.at[slot].set((ids >= 0).sum(dtype=jnp.int32)),
        state.drafts.logits,
    )
    if drafts.logits is not None:
        # Whatever the sampling makes of these logits, the draft has probability 1.
        tokens = jnp.arange(drafts.logits.shape[-1], dtype=jnp.int32)
        row = jnp.where(tokens[None, :] == ids[:, None], 0.0, -jnp.inf)
        drafts = drafts._replace(logits=drafts.logits.at[slot].set(row.astype(drafts.logits.dtype)))
        if state.drafts.cut is not None:
            nothing = Truncation.nothing(ids.shape, tokens.size)
            cut = jax.tree.map(lambda x, one: x.at[slot].set(one), state.drafts.cut, nothing)
            drafts = drafts._replace(cut=cut)
    return drafts, state.certain.at[slot].set((ids >= 0).any())


def step(
    config: LoopConfig, params: ModelParams, state: LoopState, *, fused_k: int | None = None
) -> tuple[LoopState, StepOutput]:
    """Verify every active slot's drafts, emit tokens, and draft the next ones.

    With `fused_k`, one read of the target's logits serves the greedy choice and the logprobs (up
    to that static K) of every row: the cheaper path where a kernel can do it, where every slot is
    greedy, and where most rows' logprobs are wanted. Otherwise `target_message` reads the accepted
    rows that were asked for.

    A `prefill_only` loop emits one token a request, and sends the drafts that follow it along.
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
        greedy_rows = greedy_topk_logprobs(
            target.reshape(-1, target.shape[-1]),
            fused_k,
            mesh=config.parallel.mesh,
            axis_name=config.parallel.axis_name,
        )
        choice = Greedy(greedy_rows.token_ids[:, 0], greedy_rows.token_ranks > 0)
    # What an empty slot's last request asked for must not put a greedy batch on the sampled path.
    temperature = jnp.where(state.active, state.sampling.temperature, 0.0)
    sampling = state.sampling._replace(temperature=temperature)
    verified = verify(
        target,
        drafts,
        sampling,
        state.lengths,
        accept=config.accept,
        choice=choice,
        parallel=config.parallel,
    )
    num_tokens = jnp.where(state.active, verified.num_tokens, 0)

    emitted = index < num_tokens[:, None]
    where = jnp.where(emitted, places + 1, config.max_length)
    tokens = state.tokens.at[slots, where].set(verified.token_ids, mode="drop")
    lengths = state.lengths + num_tokens
    remaining = state.remaining - num_tokens
    is_stop = (verified.token_ids[:, :, None] == state.stop_ids[:, None, :]).any(-1)
    goes_on = state.active & ~(is_stop & emitted).any(-1) & (remaining > 0)
    num_drafts = jnp.where(state.active, drafts.num, 0)
    # A draft beyond the length limit could only be cut: it is not made.
    limit = jnp.minimum(state.max_drafts, jnp.minimum(remaining, config.max_length - lengths) - 1)
    context = Context(
        tokens=tokens,
        lengths=lengths,
        verified=verified._replace(num_tokens=num_tokens),
        num_drafts=num_drafts,
        hidden=hidden,
        positions=jnp.where(emitted, places, -1),
        sampling=sampling,
        limit=jnp.where(goes_on, jnp.maximum(limit, 0), 0),
    )
    proposed, drafter = config.drafter.propose(params, state.drafter, context)
    if proposed.token_ids.shape != drafts.token_ids.shape:
        raise ValueError(
            f"the drafter proposed {proposed.token_ids.shape} drafts, but [B, D] is "
            f"{drafts.token_ids.shape}: mark fewer drafts by `num`"
        )
    proposed = proposed._replace(num=jnp.clip(proposed.num, 0, context.limit))
    slot_state = jnp.where(
        state.active,
        SlotState.PREFILL_FIRST_TOKEN if config.prefill_only else SlotState.TOKENS,
        jnp.where(state.prefilling, SlotState.NOTHING, SlotState.STOPPED),
    )
    active = goes_on & (not config.prefill_only)
    running = jnp.any(active | state.prefilling)
    output = step_output(target, drafts, verified, active=state.active, running=running)._replace(
        drafts=drafts._replace(num=jnp.where(state.certain, 0, num_drafts)),
        state=slot_state.astype(jnp.int32),
        greedy_rows=greedy_rows,
    )
    if config.prefill_only:
        # The first token, then the drafts: those are the decode node's to verify.
        output = output._replace(
            token_ids=jnp.concatenate([verified.token_ids[:, :1], proposed.token_ids], axis=1),
            num_tokens=num_tokens + proposed.num,
            num_drafts=proposed.num,
        )
    state = replace(
        state,
        cache=cache,
        drafter=drafter,
        drafts=proposed,
        certain=state.certain & ~state.active,
        tokens=tokens,
        lengths=lengths,
        active=active,
        remaining=remaining,
    )
    return state, output
