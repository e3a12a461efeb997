"""Messages to records: `state, records = step(state, message)`, a pure function. Never jax.

1. Slots whose generation is the admitted one, and whose request runs, are taken; others counted.
2. Their tokens are cut at the first stop token, stop sequence or limit, with their logprobs.
3. Counts, cumulative logprobs and acceptance are added up, a column at a time.
4. The records wait for the draft message of their step where one follows, and are released when it
   is here, at the first message of a later step, or by `flush`.

One state belongs to one ring (one publishing process rank), whose messages arrive in order.
"""

from dataclasses import replace

import numpy as np

from ipc.wire import Kind, SlotState
from jax_specdec.records import apply_target, prompt_logprobs
from jax_specdec.records.admission import admit, release
from jax_specdec.records.batch import FinishReason, RecordBatch
from jax_specdec.records.decode import Message
from jax_specdec.records.forced_end import count_finished, end
from jax_specdec.records.processor_state import (
    Phase,
    ProcessorError,
    ProcessorState,
    Progress,
    SlotColumns,
    StepLost,
    frozen,
    totals,
)
from jax_specdec.records.record import Records
from jax_specdec.wording import counted

__all__ = [
    "ProcessorState",
    "Progress",
    "Phase",
    "ProcessorError",
    "StepLost",
    "admit",
    "release",
    "abort",
    "step",
    "flush",
]

# As plain integers: NumPy takes longer to make one of an enumeration than to compare with it.
_RUNNING, _PREEMPTED = int(Phase.RUNNING), int(SlotState.PREEMPTED)

# By slot state: does the slot say anything about its request?
_SPEAKS = np.zeros(len(SlotState), np.bool_)
_SPEAKS[
    [
        SlotState.TOKENS,
        SlotState.PREEMPTED,
        SlotState.RECOVERY_STOP,
        SlotState.PREFILL_FIRST_TOKEN,
    ]
] = True


def step(state: ProcessorState, message: Message) -> tuple[ProcessorState, Records]:
    """Take one message of this ring.

    The records are views of the message's buffer, which must stay unchanged while they are used.

    Raises:
      StepLost: a target message, or a part of a prompt's logprobs, is missing or came twice.
      ProcessorError: the message contradicts what was admitted.
      In either case `state` is what it was.
    """
    if message.num_slots > state.num_slots:
        raise ProcessorError(
            f"a message of {counted(message.num_slots, 'slot')}; this state has {state.num_slots}: "
            "create it with the worker's number of slots"
        )
    if message.process_rank != state.process_rank:
        raise ProcessorError(
            f"a message of process rank {message.process_rank}; this state belongs to rank "
            f"{state.process_rank}: keep one state for each ring"
        )
    if message.kind is Kind.TARGET:
        return _target(state, message)
    if message.kind is Kind.DRAFT:
        return _draft(state, message)
    return prompt_logprobs.take(state, message)


def abort(state: ProcessorState, request_id: str) -> tuple[ProcessorState, Records]:
    """End a request at its user's wish, with one record of the reason `ABORT`.

    That record carries the request's tokens where some were waiting for a draft message. A request
    that has ended or holds no slot is left alone: no record, as its last one may be on its way.
    """
    for slot, request in enumerate(state.admitted.requests):
        if request is not None and request.id == request_id:
            return end(state, np.array([slot]), FinishReason.ABORT)
    return state, Records()


def flush(
    state: ProcessorState, reason: FinishReason | None = None
) -> tuple[ProcessorState, Records]:
    """The stream has ended: release the records that wait, and end what is live for `reason`.

    None ends nothing. The state stays good for a new stream of the same numbering.
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
    state = replace(state, waiting=None, early_draft=None, counters=counters)
    return state, Records(waiting + ended.batches)


def _target(state: ProcessorState, message: Message) -> tuple[ProcessorState, Records]:
    if state.next_step is not None and message.step != state.next_step:
        raise _step_lost(state.next_step, message.step)
    admitted, columns, counters = state.admitted, state.columns, state.counters
    b = message.num_slots
    speaks = _SPEAKS[message.state]
    mine = (admitted.generation[:b] == message.generation) & speaks
    mine &= columns.phase[:b] == _RUNNING
    if np.count_nonzero(mine) != np.count_nonzero(speaks):
        counters = apply_target.count_strangers(state, message, speaks & ~mine)
    slots = mine.nonzero()[0]
    emitted = apply_target.emitted(state, message, slots)
    if admitted.any_prompt_due:
        prompt_logprobs.check_complete(state, slots, emitted.count)
    cut = apply_target.cut(state, message, slots, emitted)

    num_tokens = columns.num_tokens.copy()
    num_tokens[slots] += cut.kept
    cumulative = apply_target.cumulative(columns.cumulative_logprob, message, slots, cut.kept)
    outcomes = apply_target.acceptance(columns, slots, emitted)
    reschedule = emitted.state == _PREEMPTED
    phase = columns.phase
    leaving = cut.num_ended or (emitted.special and reschedule.any())
    if leaving:
        phase = phase.copy()
        phase[slots[cut.reason > 0]] = Phase.ENDED
        phase[slots[reschedule]] = Phase.PREEMPTED
        counters = replace(
            counters,
            cut_tokens=counters.cut_tokens + int((emitted.count - cut.kept).sum()),
            finished=count_finished(counters.finished, cut.reason),
            preempted=counters.preempted + int(reschedule.sum()),
        )
        frozen(phase)
    after = SlotColumns(
        phase,
        frozen(num_tokens),
        frozen(cumulative),
        outcomes,
        apply_target.tail(state, message, slots, cut.kept),
        columns.num_prompt,
    )
    batch = RecordBatch(
        step=message.step,
        requests=admitted.requests,
        slots=slots,
        generation=message.generation[slots],
        num_tokens=cut.kept,
        num_drafts=emitted.num_drafts,
        num_accepted=np.maximum(emitted.count - 1, 0),
        cumulative_logprob=cumulative[slots],
        finish_reason=cut.reason,
        stop_index=cut.stop_index,
        reschedule=reschedule,
        message=message,
        row_format=admitted.row_format[slots],
        totals=totals(admitted, after) if leaving else None,
    )
    released = () if state.waiting is None else (state.waiting,)
    waiting, draft = None, state.early_draft
    if draft is not None:
        batch, late = _join(batch, draft)
        counters = replace(counters, late_drafts=counters.late_drafts + late)
    elif message.draft_follows and len(batch):
        waiting = batch
    if waiting is None and len(batch):
        released = (*released, batch)
    state = ProcessorState(
        process_rank=state.process_rank,
        next_step=message.step + 1,
        admitted=admitted,
        columns=after,
        waiting=waiting,
        early_draft=None,
        past=state.past,
        counters=counters,
    )
    return state, Records(released)


def _draft(state: ProcessorState, message: Message) -> tuple[ProcessorState, Records]:
    waiting, counters = state.waiting, state.counters
    if waiting is not None and waiting.step == message.step:
        batch, late = _join(waiting, message)
        counters = replace(counters, late_drafts=counters.late_drafts + late)
        return replace(state, waiting=None, counters=counters), Records((batch,))
    if state.next_step is None or message.step < state.next_step:
        late = counters.late_drafts + _num_with_drafts(message)
        return replace(state, counters=replace(counters, late_drafts=late)), Records()
    if message.step > state.next_step:
        raise StepLost(
            f"the draft message of step {message.step} came before the target message of step "
            f"{state.next_step}: target steps {state.next_step} to {message.step - 1} are lost"
        )
    if state.early_draft is not None:
        raise StepLost(f"the draft message of step {message.step} came twice")
    state = replace(state, waiting=None, early_draft=message)
    return state, Records(() if waiting is None else (waiting,))


def _step_lost(expected: int, step: int) -> StepLost:
    if step > expected:
        return StepLost(
            f"target message {step} came, {expected} was next: steps {expected} to {step - 1} "
            f"({step - expected}) are lost"
        )
    return StepLost(
        f"target message {step} came, {expected} was next: a message came twice or out of order"
    )


def _join(batch: RecordBatch, draft: Message) -> tuple[RecordBatch, int]:
    """The batch with its drafts, and how many of the message's slots no record took.

    Raises:
      ProcessorError: a record's drafts have other rows than its request asked for.
    """
    if not draft.num_slots:
        return batch, 0
    inside = batch.slots < draft.num_slots
    slots = np.where(inside, batch.slots, 0)
    joined = inside & (draft.generation[slots] == batch.generation) & (draft.num_tokens[slots] > 0)
    assert batch.row_format is not None  # of every step's records
    apply_target.check_rows(draft, batch.requests, slots, batch.row_format, joined)
    late = _num_with_drafts(draft) - int(np.count_nonzero(joined))
    return replace(batch, draft=draft, joined=joined), late


def _num_with_drafts(draft: Message) -> int:
    return int(np.count_nonzero(draft.num_tokens))
