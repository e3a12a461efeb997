"""Applying a target message: the tokens of each request before and after the stop rules.

Each function works on whole columns; only tokens that may end their request are examined alone.
Axes: B slots, N slots taken from this message, T tokens, R rows, D drafts, M remembered tokens.
"""

import functools
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ipc.wire import LogprobsMode, SlotState
from jax_specdec.records import stop_rules
from jax_specdec.records.batch import Counters, FinishReason
from jax_specdec.records.decode import Message
from jax_specdec.records.outcomes import Outcomes
from jax_specdec.records.processor_state import (
    KEPT_FORMAT,
    VALUES_SHIFT,
    ProcessorError,
    ProcessorState,
    SlotColumns,
    SlotPhase,
    frozen,
    is_newer,
    row_format,
)
from jax_specdec.requests import ROW_FIELDS, Request
from jax_specdec.wording import pluralize

FEW_TOKENS = 64  # of a step: Python takes them one by one in less time than NumPy needs to begin

# As plain integers: NumPy takes longer to make one of an enumeration than to compare with it.
_RUNNING, _PREEMPTED = int(SlotPhase.RUNNING), int(SlotState.PREEMPTED)


@dataclass(frozen=True, slots=True, eq=False)
class Emitted:
    """The tokens that verification emitted for N slots, before any stop; arrays [N]."""

    state: NDArray[np.int64]  # SlotState
    special: bool  # whether some slot has another state than TOKENS
    count: NDArray[np.int64]  # tokens
    num_drafts: NDArray[np.int64]  # drafts verified


@dataclass(frozen=True, slots=True, eq=False)
class StopCut:
    """The tokens of N slots that are delivered, and the requests that leave; arrays [N]."""

    kept: NDArray[np.int64]  # tokens
    reason: NDArray[np.int8]  # FinishReason, 0 where the request goes on
    stop_index: NDArray[np.int64]  # the stop token's id or the stop sequence's index, else -1
    reschedule: NDArray[np.bool_]  # the request was preempted
    some_leave: bool  # whether some request ends or was preempted


def taken(
    state: ProcessorState, message: Message, speaks: NDArray[np.bool_]
) -> tuple[NDArray[np.intp], Counters]:
    """[N] the slots whose running request this message is about, and the counters with the others.

    Args:
      speaks: [B] where the message says something about a request of the slot.

    Raises:
      ProcessorError: a generation was never admitted.
    """
    b = message.num_slots
    is_current = (state.admitted.generation[:b] == message.generation) & speaks
    is_current &= state.columns.phase[:b] == _RUNNING
    counters = state.counters
    if np.count_nonzero(is_current) != np.count_nonzero(speaks):
        counters = _count_strangers(state, message, speaks & ~is_current)
    return is_current.nonzero()[0], counters


def emitted(state: ProcessorState, message: Message, slots: NDArray[np.intp]) -> Emitted:
    """The tokens that the message's `slots` emitted.

    Raises:
      ProcessorError: a first token that would come twice, or other rows than were asked for.
    """
    slot_state, count = message.state[slots], message.num_tokens[slots]
    num_drafts = message.num_drafts[slots]
    special = bool(np.count_nonzero(slot_state))  # TOKENS is 0
    if special:
        first = slot_state == SlotState.PREFILL_FIRST_TOKEN
        again = first & (state.columns.num_tokens[slots] > 0)
        if again.any():
            request = state.admitted.requests[slots[again.argmax()]]
            raise ProcessorError(
                f"a prefill's first token for request {request.id if request else None!r}, which "
                "has tokens already: it would be delivered twice"
            )
        count = np.where(first, 1, count)  # the rest are drafts of the next step
        num_drafts = np.where(slot_state == SlotState.TOKENS, num_drafts, 0)
    check_target_rows(
        message, state.admitted.requests, slots, state.admitted.row_format[slots], count > 0
    )
    return Emitted(slot_state, special, count, num_drafts)


def check_target_rows(
    message: Message,
    requests: tuple[Request | None, ...],
    slots: NDArray[np.intp],
    expected: NDArray[np.int64],
    counts: NDArray[np.bool_],
) -> None:
    """Raise ProcessorError where the rows of N slots are not what their requests asked for.

    Args:
      message: a target or a draft message: both have rows of one format.
      requests: [B] the requests that the slots' tokens belong to.
      slots: [N].
      expected: [N] the requests' `row_format`.
      counts: [N] where the message has tokens of the slot's request; other slots are not checked.
    """
    sent_format = row_format(
        message.columns, message.num_chosen, message.mode, message.kept, message.values
    )
    wrong = sent_format[slots] != expected
    if not np.count_nonzero(wrong) or not (wrong & counts).any():
        return
    slot = int(slots[(wrong & counts).argmax()])
    request = requests[slot]
    assert request is not None
    params = request.params
    due = int(expected[slots == slot][0])
    if message.values[slot] != due >> VALUES_SHIFT:
        raise ProcessorError(
            f"slot {slot}: request {request.id!r} asked for {_names(due >> VALUES_SHIFT)} of each "
            f"row; the {message.kind.name.lower()} message of step {message.step} has "
            f"{_names(int(message.values[slot]))}: a worker sends what was asked for"
        )
    if bool(message.kept[slot]) != bool(due & KEPT_FORMAT):
        expected_sets, sent = (
            ("kept sets", "none") if params.kept_token_ids else ("no kept sets", "some")
        )
        raise ProcessorError(
            f"slot {slot}: request {request.id!r} asked for {expected_sets}; the message of step "
            f"{message.step} has {sent}: a worker sends what was asked for"
        )
    chosen = pluralize(len(params.extra_token_ids), "chosen id")
    raise ProcessorError(
        f"slot {slot}: request {request.id!r} asked for {pluralize(params.num_columns, 'column')} "
        f"(K + 1, or 0 without logprobs), {chosen} and mode "
        f"{params.logprobs_mode.name}; the {message.kind.name.lower()} message of step "
        f"{message.step} has {message.columns[slot]}, {message.num_chosen[slot]} and "
        f"{LogprobsMode(message.mode[slot]).name}: a worker sends what was asked for"
    )


def _names(values: int) -> str:
    return ", ".join(name for name, bits in ROW_FIELDS.items() if values & bits) or "nothing"


def _count_strangers(
    state: ProcessorState, message: Message, strangers: NDArray[np.bool_]
) -> Counters:
    """The counters with the slots that are about no running request.

    Raises:
      ProcessorError: a generation was never admitted.
    """
    admitted = state.admitted.generation[: message.num_slots]
    surplus = strangers & (admitted == message.generation)
    late = strangers & (admitted != message.generation)
    future = late & ((admitted < 0) | is_newer(message.generation, admitted))
    if future.any():
        slot = int(future.argmax())
        raise ProcessorError(
            f"slot {slot}: the message is about generation {message.generation[slot]}, "
            f"but the last one admitted is {admitted[slot]}: admit a request before the worker "
            "runs it"
        )
    counters = state.counters
    first = message.state == SlotState.PREFILL_FIRST_TOKEN
    tokens = np.where(first, 1, message.num_tokens)[surplus].sum()
    return replace(
        counters,
        surplus_tokens=counters.surplus_tokens + int(tokens),
        late_slots=counters.late_slots + int(late.sum()),
    )


def cut(
    state: ProcessorState, message: Message, slots: NDArray[np.intp], emitted: Emitted
) -> StopCut:
    """Cut the tokens of `slots` at the first stop token, stop sequence or length limit."""
    admitted = state.admitted
    room = admitted.limit[slots] - state.columns.num_tokens[slots]
    num_kept = np.minimum(emitted.count, room)
    reason = admitted.limit_reason[slots] * (emitted.count >= room)
    stop_index = np.empty(len(slots), np.int64)
    stop_index.fill(-1)
    if len(admitted.stop_keys) > 1:
        owner = np.arange(message.num_slots).repeat(message.num_tokens)
        tokens = stop_rules.stop_keys(owner, message.token_ids)
        candidates = stop_rules.stop_candidates(admitted.stop_keys, tokens)
        if candidates.size:
            row_of = np.full(message.num_slots, -1)
            row_of[slots] = np.arange(len(slots))
            for token in candidates.tolist():
                slot = int(owner[token])
                row, position = int(row_of[slot]), token - int(message.token_start[slot])
                if row >= 0 and position < num_kept[row]:
                    stop = _stop_at(state, message, slot, position)
                    if stop is not None:
                        num_kept[row] = position + 1
                        reason[row], stop_index[row] = stop
    if emitted.special:
        reason[emitted.state == SlotState.RECOVERY_STOP] = FinishReason.RECOVERY_ERROR
    reschedule = emitted.state == _PREEMPTED
    some_leave = bool(np.count_nonzero(reason) or (emitted.special and reschedule.any()))
    return StopCut(num_kept, reason, stop_index, reschedule, some_leave)


def _stop_at(
    state: ProcessorState, message: Message, slot: int, position: int
) -> tuple[FinishReason, int] | None:
    """The stop rule that the slot's token at `position` of this message fulfils, or None."""
    request = state.admitted.requests[slot]
    assert request is not None
    params, start = request.params, int(message.token_start[slot])
    token = int(message.token_ids[start + position])
    if token in params.stop_token_ids:
        return FinishReason.STOP_TOKEN, token
    before = int(state.columns.num_tokens[slot])
    remembered = min(before, state.columns.tail.shape[1])
    tail = state.columns.tail[slot, state.columns.tail.shape[1] - remembered :].tolist()
    emitted = message.token_ids[start : start + position + 1].tolist()
    index = stop_rules.sequence_ending(params, tail + emitted, before + len(emitted))
    return None if index is None else (FinishReason.STOP_SEQUENCE, index)


def added_up(
    state: ProcessorState, message: Message, slots: NDArray[np.intp], emitted: Emitted, cut: StopCut
) -> SlotColumns:
    """The columns after this message."""
    before = state.columns
    num_tokens, phase = before.num_tokens.copy(), before.phase
    num_tokens[slots] += cut.kept
    if cut.some_leave:
        phase = phase.copy()
        phase[slots[cut.reason > 0]] = SlotPhase.ENDED
        phase[slots[cut.reschedule]] = SlotPhase.PREEMPTED
        frozen(phase)
    return SlotColumns(
        phase=phase,
        num_tokens=frozen(num_tokens),
        cumulative_logprob=cumulative(before.cumulative_logprob, message, slots, cut.kept),
        outcomes=outcomes(before.outcomes, slots, emitted, message.most_drafts),
        tail=tail(state, message, slots, cut.kept),
        num_prompt=before.num_prompt,
    )


def cumulative(
    before: NDArray[np.float64],
    message: Message,
    slots: NDArray[np.intp],
    num_kept: NDArray[np.int64],
) -> NDArray[np.float64]:
    """[B] `before` plus the kept tokens' logprobs, added one by one in float64."""
    if message.same_columns is not None and int(num_kept.sum()) == len(message.token_ids):
        return cumulative_of_all(before, message)
    after, columns = before.copy(), message.columns[slots]
    width = columns + message.num_more[slots]
    rows = num_kept * (columns > 0)
    ends = rows.cumsum()
    if ends.size and ends[-1]:
        first = message.logprob_start[slots] - (ends - rows) * width
        index = np.arange(ends[-1]) * width.repeat(rows) + first.repeat(rows)
        np.add.at(after, slots.repeat(rows), message.logprobs[index].astype(np.float64))
    return frozen(after)


def cumulative_of_all(before: NDArray[np.float64], message: Message) -> NDArray[np.float64]:
    """`cumulative` of all tokens of a message whose rows are alike."""
    if not message.same_columns:
        return before
    token_logprobs = message.logprobs[:: message.same_columns]  # a table's first column
    if len(token_logprobs) <= FEW_TOKENS:
        sums, values = before.tolist(), iter(token_logprobs.tolist())
        for slot, count in enumerate(message.num_tokens.tolist()):
            for value in islice(values, count):  # `sum` rounds otherwise from Python 3.12 on
                sums[slot] += value
        return frozen(np.array(sums))
    after, owners = before.copy(), all_slots(message.num_slots).repeat(message.num_tokens)
    np.add.at(after, owners, token_logprobs.astype(np.float64))
    return frozen(after)


@functools.lru_cache(16)
def all_slots(number: int) -> NDArray[np.int64]:
    """[number] int64: 0, 1, ...; read-only."""
    return frozen(np.arange(number))


def outcomes(
    before: Outcomes, slots: NDArray[np.intp], emitted: Emitted, most_drafts: int
) -> Outcomes:
    """The outcomes with this step's drafts, of which no slot has more than `most_drafts`."""
    drafts, count = emitted.num_drafts, emitted.count
    if emitted.special:
        counts = count > 0
        slots, drafts, count = slots[counts], drafts[counts], count[counts]
    return before.after(slots, drafts, count, most_drafts) if len(slots) else before


def tail(
    state: ProcessorState, message: Message, slots: NDArray[np.intp], num_kept: NDArray[np.int64]
) -> NDArray[np.int32]:
    """[B, M] the remembered tokens after this message, where stop sequences need them."""
    before = state.columns.tail
    needed = (state.admitted.history[slots] > 0) & (num_kept > 0) if before.shape[1] else None
    if needed is None or not needed.any():
        return before
    slots, num_kept = slots[needed], num_kept[needed]
    size = before.shape[1]
    # The last `size` of the old tail followed by the kept tokens; below 0 still the old tail.
    source = num_kept[:, None] - np.arange(size, 0, -1)[None, :]
    new = message.token_ids[message.token_start[slots][:, None] + np.maximum(source, 0)]
    old = np.take_along_axis(before[slots], np.minimum(source, -1) + size, axis=1)
    after = before.copy()
    after[slots] = np.where(source >= 0, new, old)
    return frozen(after)
