"""Messages to records: `state, records = step(state, message)`, a pure function.

A target message is applied in four steps:

1. Take the slots whose generation is the admitted one and whose request runs; count the others.
2. Cut their tokens, with the logprobs, at the first stop token, stop sequence or limit.
3. Add up counts, cumulative logprobs and acceptance, a column at a time.
4. Release the records: at once, or, where a draft message follows, when that message is here, at
   the first message of a later step, or by `flush`.

Where nothing can end and all slots emit alike, as in nearly every step of a full worker,
`usual_step` does steps 1 to 3 at once.

One state belongs to one ring (one publishing process rank), whose messages arrive in order.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ipc.wire import Kind, SlotState
from jax_specdec.records import apply_target, prompt_logprobs, usual_step
from jax_specdec.records.admission import admit, release
from jax_specdec.records.batch import Counters, FinishReason, RecordBatch
from jax_specdec.records.decode import Message
from jax_specdec.records.processor_state import (
    DRAFT_FORMAT,
    ProcessorError,
    ProcessorState,
    Progress,
    SlotPhase,
    StepLost,
    frozen,
    totals,
)
from jax_specdec.records.record import Records
from jax_specdec.wording import pluralize

__all__ = [
    "ProcessorState", "Progress", "SlotPhase", "ProcessorError", "StepLost", "admit", "release",
    "abort", "step", "flush",
]  # fmt: skip

# [state] whether a slot in that state says anything about its request.
_SPEAKS = np.array([state not in (SlotState.NOTHING, SlotState.STOPPED) for state in SlotState])


def step(state: ProcessorState, message: Message) -> tuple[ProcessorState, Records]:
    """Apply one message of this ring; returns the next state and the records that it releases.

    The records are views of the message's buffer, which must stay unchanged while they are used.

    Raises:
      StepLost: a target message, or a part of a prompt's logprobs, is missing or came twice.
      ProcessorError: the message contradicts what was admitted.
    """
    if message.num_slots > state.num_slots:
        raise ProcessorError(
            f"a message of {pluralize(message.num_slots, 'slot')}; this state has {state.num_slots}"
            ": create the state with the worker's number of slots"
        )
    if message.process_rank != state.process_rank:
        raise ProcessorError(
            f"a message of process rank {message.process_rank}; this state belongs to rank "
            f"{state.process_rank}: keep one state for each ring"
        )
    if message.most_drafts > state.num_drafts:
        slot = int((message.num_drafts > state.num_drafts).argmax())
        raise ProcessorError(
            f"slot {slot}: {pluralize(int(message.num_drafts[slot]), 'draft')}; this state's "
            f"worker proposes {state.num_drafts} at most: create the state with the worker's number"
        )
    if message.kind is Kind.TARGET:
        return _target(state, message)
    if message.kind is Kind.DRAFT:
        return _draft(state, message)
    return prompt_logprobs.take(state, message)


def abort(
    state: ProcessorState, request_id: str, reason: FinishReason = FinishReason.ABORT
) -> tuple[ProcessorState, Records]:
    """End a request at its user's wish, with one record of the reason.

    That record carries the request's tokens where some were waiting for a draft message. For a
    request that has ended or holds no slot there is no record: its last one may be on its way.
    """
    for slot, request in enumerate(state.admitted.requests):
        if request is not None and request.id == request_id:
            return end(state, np.array([slot]), reason)
    return state, Records()


def flush(
    state: ProcessorState, reason: FinishReason | None = None
) -> tuple[ProcessorState, Records]:
    """Release the records that wait, as the stream has ended, and end live requests for `reason`.

    Without a reason, requests stay as they are. The state can take a new stream that continues the
    numbering.
    """
    slots = np.arange(state.num_slots)
    ended = Records()
    if reason is not None:
        state, ended = end(state, slots, reason)
    waiting = () if state.waiting is None else (state.waiting,)
    counters = state.counters
    if state.early_draft is not None:
        late = counters.late_drafts + _num_with_drafts(state.early_draft)
        counters = replace(counters, late_drafts=late)
    state = state._replace(waiting=None, early_draft=None, counters=counters)
    return state, Records(waiting + ended.batches)


def _target(state: ProcessorState, message: Message) -> tuple[ProcessorState, Records]:
    """Apply a target message in the four steps of this module."""
    expected, came = state.next_step, message.step
    if expected is not None and came != expected:
        why = "a message came twice or out of order"
        if came > expected:
            why = f"steps {expected} to {came - 1} ({came - expected}) are lost"
        raise StepLost(f"target message {came} came, {expected} was next: {why}")
    if usual_step.is_usual(state, message):
        state, batch = usual_step.applied(state, message)
        return state, Records((batch,))
    slots, counters = apply_target.taken(state, message, _SPEAKS[message.state])
    emitted = apply_target.emitted(state, message, slots)
    if state.admitted.any_prompt_due:
        prompt_logprobs.check_complete(state, slots, emitted.count)
    cut = apply_target.cut(state, message, slots, emitted)
    columns = apply_target.added_up(state, message, slots, emitted, cut)
    if cut.some_leave:
        counters = replace(
            counters,
            cut_tokens=counters.cut_tokens + int((emitted.count - cut.kept).sum()),
            finished=count_finished(counters.finished, cut.reason),
            preempted=counters.preempted + int(cut.reschedule.sum()),
        )
    batch = RecordBatch(
        step=message.step,
        requests=state.admitted.requests,
        slots=slots,
        generation=message.generation[slots],
        num_tokens=cut.kept,
        num_drafts=emitted.num_drafts,
        num_accepted=np.maximum(emitted.count - 1, 0),
        cumulative_logprob=columns.cumulative_logprob[slots],
        finish_reason=cut.reason,
        stop_index=cut.stop_index,
        reschedule=cut.reschedule,
        message=message,
        row_format=state.admitted.row_format[slots],
        totals=totals(state.admitted, columns) if cut.some_leave else None,
    )
    released, waiting, counters = _released(state, batch, message.draft_follows, counters)
    state = state._replace(
        next_step=message.step + 1,
        columns=columns,
        waiting=waiting,
        early_draft=None,
        counters=counters,
    )
    return usual_step.with_outlook(state), Records(released)


def _released(
    state: ProcessorState, batch: RecordBatch, draft_follows: bool, counters: Counters
) -> tuple[tuple[RecordBatch, ...], RecordBatch | None, Counters]:
    """The batches to release, oldest first, the one that waits instead, and the counters."""
    released = () if state.waiting is None else (state.waiting,)
    if state.early_draft is not None:
        batch, late = _join(batch, state.early_draft)
        counters = replace(counters, late_drafts=counters.late_drafts + late)
    elif draft_follows and len(batch):
        return released, batch, counters
    return (*released, batch) if len(batch) else released, None, counters


def _draft(state: ProcessorState, message: Message) -> tuple[ProcessorState, Records]:
    """Join a draft message to the records that wait, keep it for its target, or count it late."""
    waiting, counters = state.waiting, state.counters
    if waiting is not None and waiting.step == message.step:
        batch, late = _join(waiting, message)
        counters = replace(counters, late_drafts=counters.late_drafts + late)
        return state._replace(waiting=None, counters=counters), Records((batch,))
    if state.next_step is None or message.step < state.next_step:
        late = counters.late_drafts + _num_with_drafts(message)
        return state._replace(counters=replace(counters, late_drafts=late)), Records()
    if message.step > state.next_step:
        raise StepLost(
            f"the draft message of step {message.step} came before the target message of step "
            f"{state.next_step}: target steps {state.next_step} to {message.step - 1} are lost"
        )
    if state.early_draft is not None:
        raise StepLost(f"the draft message of step {message.step} came twice")
    state = state._replace(waiting=None, early_draft=message)
    return state, Records(() if waiting is None else (waiting,))


def _join(batch: RecordBatch, draft: Message) -> tuple[RecordBatch, int]:
    """The batch with its drafts, and the number of slots with drafts that no record took.

    Raises:
      ProcessorError: a record's drafts have other rows than its request asked for.
    """
    if not draft.num_slots:
        return batch, 0
    inside = batch.slots < draft.num_slots
    slots = np.where(inside, batch.slots, 0)
    joined = inside & (draft.generation[slots] == batch.generation) & (draft.num_tokens[slots] > 0)
    assert batch.row_format is not None  # of every step's records
    expected = batch.row_format & DRAFT_FORMAT
    apply_target.check_target_rows(draft, batch.requests, slots, expected, joined)
    late = _num_with_drafts(draft) - int(np.count_nonzero(joined))
    return replace(batch, draft=draft, joined=joined), late


def _num_with_drafts(draft: Message) -> int:
    return int(np.count_nonzero(draft.num_tokens))


def end(
    state: ProcessorState, slots: NDArray[np.intp], reason: FinishReason
) -> tuple[ProcessorState, Records]:
    """End the running and preempted requests in `slots` (ascending).

    Where a request's record waits for a draft message, that record is released with the reason; the
    other records of its batch keep waiting.
    """
    admitted, columns = state.admitted, state.columns
    phase = columns.phase[slots]
    slots = slots[(phase == SlotPhase.RUNNING) | (phase == SlotPhase.PREEMPTED)]
    if not slots.size:
        return state, Records()
    phase = columns.phase.copy()
    phase[slots] = SlotPhase.ENDED
    columns = columns._replace(phase=frozen(phase))
    source = totals(admitted, columns)
    batches: list[RecordBatch] = []
    waiting = state.waiting
    if waiting is not None:
        current = waiting.generation == admitted.generation[waiting.slots]
        taken = current & np.isin(waiting.slots, slots)
        if taken.any():
            slots = slots[~np.isin(slots, waiting.slots[taken])]
            out, rest = waiting.take(np.flatnonzero(taken)), np.flatnonzero(~taken)
            batches.append(out.ended(reason, source))
            waiting = waiting.take(rest) if rest.size else None
    if slots.size:
        empty = RecordBatch.without_tokens(
            step=(state.next_step or 0) - 1,
            requests=admitted.requests,
            slots=slots,
            generation=admitted.generation[slots],
            cumulative_logprob=columns.cumulative_logprob[slots],
        )
        batches.append(empty.ended(reason, source))
    num_ended = sum(map(len, batches))
    counts = count_finished(state.counters.finished, np.full(num_ended, reason, np.int8))
    counters = replace(state.counters, finished=counts)
    state = state._replace(columns=columns, waiting=waiting, counters=counters)
    return state, Records(tuple(batches))


def count_finished(finished: tuple[int, ...], reason: NDArray[np.int8]) -> tuple[int, ...]:
    """The numbers of finished requests by `FinishReason`, with those of `reason` [N] added."""
    counts = np.bincount(reason, minlength=len(finished) + 1)[1:].tolist()
    return tuple(before + count for before, count in zip(finished, counts, strict=True))
