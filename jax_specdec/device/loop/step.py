"""A step of the decoding loop: the pure function that moves the state of all slots.

``state.admit`` puts a request into a slot, ``prompt_chunks.prefill_chunk`` runs its prompt,
``step`` verifies the drafts of every slot and proposes the next ones; `step_messages` turns what a
step emitted into the words that travel to the engine. Each is a function of the state and of small
host values, so the host launches step n + 1 without having seen step n.

Axes: B slots, S = D + 1 positions, D drafts, T tokens of a slot, E hidden size, V vocabulary.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ipc.wire import SlotState
from jax_specdec.device.drafting.drafters import Context, ReportDrafts
from jax_specdec.device.loop.state import LoopConfig, LoopState
from jax_specdec.device.messages.batch_options import BatchOptions, Widths
from jax_specdec.device.messages.logit_changes import (
    RowChanges,
    SlotChanges,
    Written,
    changed_logits,
    row_changes,
)
from jax_specdec.device.messages.row_logprobs import draft_rows
from jax_specdec.device.messages.step_messages import StepOutput, step_output
from jax_specdec.device.model.own_model import head as logits
from jax_specdec.device.model.own_model import run_model as forward
from pallas_kernels.sampling import Drafts, Sampling, Verified, verify


class StepRows(NamedTuple):
    """The rows that the target model ran."""

    positions: Int32[Array, "B S"]  # of the rows' own tokens
    hidden: Float[Array, "B S E"]
    logits: Float[Array, "B S V"]  # row j predicts the token after its slot's drafts 0..j-1


def step(
    config: LoopConfig,
    params: Any,
    state: LoopState,
    options: BatchOptions | None = None,
    *,
    report_widths: Widths | None = None,
    changes: SlotChanges | None = None,
    samples: bool = True,
    num_drafts: int | None = None,
) -> tuple[LoopState, Annotated[StepOutput, "D = W"]]:
    """Verify every active slot's drafts, emit tokens, and draft the next ones.

    1. The target model runs each slot's last known token and its drafts.
    2. Verification emits the accepted drafts and one token more.
    3. The slots' tokens grow by what was emitted; a stop token or a limit ends a slot.
    4. The drafter proposes for the slots that go on.

    `target_message` reads the accepted rows whose logprobs were asked for.

    With `report_widths`, the static widths of `options`, what the next draft message has of the
    drafts is made as they are drawn.

    With `changes`, tokens are chosen from changed logits. Without them, no program knows that there
    are any.

    Without `samples`, static, no active slot has a temperature, and the program verifies greedily.

    With `num_drafts`, static, no more drafts of a slot are verified: S is that and one. The others
    are dropped, and D are proposed as ever; behind 0, drafts that would be drawn are not, as a
    draft costs a pass of its own.

    A `prefill_only` loop emits one token a request, and sends the drafts that follow it along.

    It is `forward_rows`, then `choose`: two programs where masks are made between them.
    """
    proposed = state.drafts
    if num_drafts is not None:
        state = state._replace(drafts=_leading(proposed, num_drafts))
    state, rows = forward_rows(config, params, state)
    return choose(
        config, params, state, rows, options,
        report_widths=report_widths, changes=changes, samples=samples,
        proposes=num_drafts != 0 or proposed.q is None, all_drafts=proposed,
    )  # fmt: skip


def choose(
    config: LoopConfig,
    params: Any,
    state: LoopState,
    rows: StepRows,
    options: BatchOptions | None = None,
    *,
    report_widths: Widths | None = None,
    changes: SlotChanges | None = None,
    samples: bool = True,
    proposes: bool = True,
    all_drafts: Annotated[Drafts, "D = all"] | None = None,
) -> tuple[Annotated[LoopState, "D = all"], StepOutput]:
    """All of a step behind the model's forward pass; arguments as `step`, and its rows.

    Without `proposes`, static, no slot gets a draft. `all_drafts` are those of the slots, where
    the state has only the first of them.

    Where a grammar excludes a certain draft, it and those behind it are not proposed. To drop one
    that was drawn would bias the tokens: verification rejects it, as its probability is 0.
    """
    drafts_before = state.drafts if all_drafts is None else all_drafts
    if changes is not None and changes.grammar is not None and state.drafts.q is None:
        num = jnp.minimum(state.drafts.num, changes.grammar.num_legal)
        state = state._replace(drafts=state.drafts._replace(num=num))
    # What an empty slot's last request asked for must not put a greedy batch on the sampled path.
    temperature = jnp.where(state.active, state.sampling.temperature, 0.0)
    sampling = state.sampling._replace(temperature=temperature)
    changed = handed_down = None
    if changes is not None and changes.penalties is not None:
        written = Written(state.tokens, state.lengths, state.drafts.token_ids)
        changed = changed_logits(rows.logits, changes, written, config.parallel)
    elif changes is not None:
        sizes = state.drafts.token_ids.shape[1] + 1, config.model.vocab_size
        handed_down = row_changes(changes, state.lengths, *sizes)
    choice_rows = rows if changed is None else rows._replace(logits=changed)
    verified = _verify(config, state, choice_rows, sampling, handed_down, samples)
    grown = _grow(config, state, rows, verified)
    report_drafts = None
    if options is not None and report_widths is not None:
        report_drafts = draft_rows(options, report_widths, config.parallel)
    proposed, drafter = _propose(
        config, params, state, rows, verified, grown, sampling, report_drafts, proposes
    )

    active = grown.goes_on & (not config.prefill_only)
    output = step_output(
        rows.logits,
        state.drafts,
        verified,
        active=state.active,
        running=jnp.any(active | state.prefilling),
        changed=changed,
        changes=handed_down,
    )
    output = output._replace(
        # Drafts that were handed over were not drawn here.
        drafts=output.drafts._replace(num=jnp.where(state.certain, 0, output.num_drafts)),
        state=_slot_states(config, state),
    )
    if config.prefill_only:
        # The first token, then the drafts: those are the decode node's to verify.
        output = output._replace(
            token_ids=jnp.concatenate([verified.token_ids[:, :1], proposed.token_ids], axis=1),
            num_tokens=output.num_tokens + proposed.num,
            num_drafts=proposed.num,
        )
    if report_widths is not None and proposed.report is not None and state.drafts.report is None:
        # No slot whose drafts were verified now had asked: its rows are nobody's.
        verified_ones = _leading(proposed, state.drafts.token_ids.shape[1])
        zeros = jax.tree.map(jnp.zeros_like, verified_ones.report)
        output = output._replace(drafts=output.drafts._replace(report=zeros))
    output = output._replace(fates=fates_of(drafts_before, output))
    state = state._replace(
        drafter=drafter,
        drafts=proposed,
        certain=state.certain & ~state.active,
        tokens=grown.tokens,
        lengths=grown.lengths,
        active=active,
        remaining=grown.remaining,
    )
    return state, output


class _Grown(NamedTuple):
    """The slots' sequences with what a step emitted."""

    emitted: Bool[Array, "B S"]
    tokens: Int32[Array, "B T"]
    lengths: Int32[Array, " B"]
    remaining: Int32[Array, " B"]
    goes_on: Bool[Array, " B"]


def forward_rows(config: LoopConfig, params: Any, state: LoopState) -> tuple[LoopState, StepRows]:
    """Run the last known token and the drafts of each slot; other rows write no cache entry."""
    drafts = state.drafts
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)
    inputs = jnp.concatenate([last, drafts.token_ids], axis=1)
    index = _position_index(state)
    positions = state.lengths[:, None] - 1 + index
    is_row = state.active[:, None] & (index <= drafts.num[:, None])
    hidden, cache = forward(
        params, config.model, inputs, jnp.where(is_row, positions, -1), state.cache
    )
    rows = StepRows(positions, hidden, logits(params, config.model, hidden))
    return state._replace(cache=cache), rows


def seen(config: LoopConfig, state: LoopState) -> Int32[Array, "B _"]:
    """Values of each slot by which a host follows its text, before its drafts are verified.

    Returns:
      By slot: known tokens, whether it is decoding, number of drafts, the last S known tokens (no
      step emits more) and D drafts. `Seen` takes it apart.
    """
    places = state.lengths[:, None] - config.num_positions + _position_index(state)
    last = jnp.take_along_axis(state.tokens, jnp.maximum(places, 0), axis=1)
    counts = state.lengths, state.active.astype(jnp.int32), state.drafts.num
    return jnp.concatenate([jnp.stack(counts, axis=1), last, state.drafts.token_ids], axis=1)


def _verify(
    config: LoopConfig,
    state: LoopState,
    rows: StepRows,
    sampling: Sampling,
    changes: RowChanges | None,
    samples: bool,
) -> Verified:
    """Verify the slots' drafts; slots that are not active emit nothing.

    Two and more drafts that were drawn are accepted together: never fewer, by the same law.
    """
    drawn = state.drafts.q is not None and state.drafts.token_ids.shape[1] > 1
    verified = verify(
        rows.logits,
        state.drafts,
        sampling,
        state.lengths,
        accept=config.accept,
        rule="block" if drawn and config.accept is None else "token",
        all_greedy=not samples,
        **config.parallel.columns,
        **({} if changes is None else changes._asdict()),
    )
    return verified._replace(num_tokens=jnp.where(state.active, verified.num_tokens, 0))


def _grow(config: LoopConfig, state: LoopState, rows: StepRows, verified: Verified) -> _Grown:
    """Append what was emitted, and see which slots go on."""
    num_tokens = verified.num_tokens
    emitted = _position_index(state) < num_tokens[:, None]
    slots = jnp.arange(config.num_slots, dtype=jnp.int32)[:, None]
    where = jnp.where(emitted, rows.positions + 1, config.max_length)
    remaining = state.remaining - num_tokens
    is_stop = (verified.token_ids[:, :, None] == state.stop_ids[:, None, :]).any(-1)
    return _Grown(
        emitted=emitted,
        tokens=state.tokens.at[slots, where].set(verified.token_ids, mode="drop"),
        lengths=state.lengths + num_tokens,
        remaining=remaining,
        goes_on=state.active & ~(is_stop & emitted).any(-1) & (remaining > 0),
    )


def _propose(
    config: LoopConfig,
    params: Any,
    state: LoopState,
    rows: StepRows,
    verified: Verified,
    grown: _Grown,
    sampling: Sampling,
    report_drafts: ReportDrafts | None,
    proposes: bool,
) -> tuple[Annotated[Drafts, "D = all"], Any]:
    """Let the drafter propose for the slots that go on; its proposals and its state."""
    # A draft beyond the length limit could only be cut: it is not made.
    room = jnp.minimum(grown.remaining, config.max_length - grown.lengths) - 1
    limit = jnp.maximum(jnp.minimum(state.max_drafts, room), 0)
    context = Context(
        tokens=grown.tokens,
        lengths=grown.lengths,
        verified=verified,
        num_drafts=jnp.where(state.active, state.drafts.num, 0),
        hidden=rows.hidden,
        positions=jnp.where(grown.emitted, rows.positions, -1),
        sampling=sampling,
        limit=jnp.where(grown.goes_on & proposes, limit, 0),
        proposes=proposes,
        report_drafts=report_drafts,
    )
    proposed, drafter = config.drafter.propose(params, state.drafter, context)
    if proposed.token_ids.shape != state.handed_over.shape:
        raise ValueError(
            f"the drafter proposed {proposed.token_ids.shape} drafts, but [B, D] is "
            f"{state.handed_over.shape}: mark fewer drafts by `num`"
        )
    return proposed._replace(num=jnp.clip(proposed.num, 0, context.limit)), drafter


def _slot_states(config: LoopConfig, state: LoopState) -> Int32[Array, " B"]:
    """The `SlotState` of each slot in this step."""
    states = jnp.where(
        state.active,
        SlotState.PREFILL_FIRST_TOKEN if config.prefill_only else SlotState.TOKENS,
        jnp.where(state.prefilling, SlotState.NOTHING, SlotState.STOPPED),
    )
    return states.astype(jnp.int32)


def _position_index(state: LoopState) -> Int32[Array, "1 S"]:
    return jnp.arange(state.drafts.token_ids.shape[1] + 1, dtype=jnp.int32)[None, :]


def _leading(drafts: Drafts, count: int) -> Annotated[Drafts, "D = W"]:
    """The first `count` drafts of each slot."""
    arrays = drafts.token_ids, drafts.q, drafts.report
    token_ids, q, report = jax.tree.map(lambda x: x[:, :count], arrays)
    return Drafts(token_ids, jnp.minimum(drafts.num, count), q, report)


def fates_of(proposed: Drafts, output: Annotated[StepOutput, "D = W"]) -> Int32[Array, " B"]:
    """How many of each slot's drafts are the tokens that it emitted, up to the first that is not.

    Where one is not, or there is none for a token, it is ~that number. A certain draft tells of the
    token behind the verified ones, too: it would have been accepted. One that was drawn does not.
    """
    width = output.token_ids.shape[1] - (proposed.q is not None)
    ids, emitted = (x[:, :width] for x in (proposed.token_ids, output.token_ids))
    width = min(ids.shape[1], emitted.shape[1])
    index = jnp.arange(width, dtype=jnp.int32)[None]
    judged = jnp.minimum(output.num_tokens, width)
    same = (ids[:, :width] == emitted[:, :width]) & (index < proposed.num[:, None])
    same &= index < judged[:, None]
    right = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    return jnp.where(right < judged, ~right, right)
