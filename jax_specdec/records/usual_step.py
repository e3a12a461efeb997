"""The step of a full worker whose requests all go on: what a step nearly always is.

Every slot has a running request, and all ask for rows of one format. None of the step's tokens is
in a stop rule, and none may be the last that a request may have. Then no slot is looked at by
itself and nothing is decided. Other steps, and those of which this is not certain, go through
`apply_target`; where a step is usual, both have the same results.

A step of few requests takes as long as its calls of NumPy: here they are few.
"""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records import stop_rules
from jax_specdec.records.apply_target import FEW_TOKENS, all_slots, cumulative_of_all
from jax_specdec.records.batch import RecordBatch
from jax_specdec.records.decode import Message
from jax_specdec.records.processor_state import (
    Outlook,
    ProcessorState,
    SlotColumns,
    SlotPhase,
    frozen,
    row_format,
)
from jax_specdec.records.slot_fields import all_equal


def with_outlook(state: ProcessorState) -> ProcessorState:
    """The state after a step, which knows whether the next ones may be usual."""
    known = state.outlook
    if known is None or not known.is_about(state.admitted, state.columns):
        known = _outlook(state)
    elif not known.may_be_usual:
        return state
    room = 0
    if known.may_be_usual:
        room = int((state.admitted.limit - state.columns.num_tokens).min())
    return state._replace(outlook=known, room=room)


def _outlook(state: ProcessorState) -> Outlook:
    admitted, phase = state.admitted, state.columns.phase
    row = int(admitted.row_format[0])
    columns, mode = row & 0xFFFF, row >> 32
    if (
        row != row_format(columns, 0, mode)  # chosen ids; kept sets and values make no mode
        or np.count_nonzero(admitted.row_format != row)
        or np.count_nonzero(phase != int(SlotPhase.RUNNING))
        or np.count_nonzero(admitted.history)
        or admitted.any_prompt_due
    ):
        return Outlook(admitted, phase)
    stop_ids = stop_rules.ids_of_rules(admitted.stop_keys)
    return Outlook(admitted, phase, True, admitted.generation.tobytes(), columns, mode, stop_ids)


def is_usual(state: ProcessorState, message: Message) -> bool:
    """Whether a target message, the next one, is certainly that of a usual step."""
    common = state.outlook
    if (
        common is None
        or message.most_drafts + 1 >= state.room
        or message.same_columns != common.columns
        or not common.is_about(state.admitted, state.columns)
        or message.draft_follows
        or state.waiting is not None
        or state.early_draft is not None
        or message.same_mode != common.mode
        or message.generation.tobytes() != common.generations
    ):
        return False
    if not common.stop_ids:
        return True
    if len(message.token_ids) <= FEW_TOKENS:
        return common.stop_ids.isdisjoint(message.token_ids.tolist())
    owners = all_slots(message.num_slots).repeat(message.num_tokens)
    keys = stop_rules.stop_keys(owners, message.token_ids)
    return not stop_rules.stop_candidates(state.admitted.stop_keys, keys).size


def applied(state: ProcessorState, message: Message) -> tuple[ProcessorState, RecordBatch]:
    """The state after a usual step, and its records."""
    before, number = state.columns, message.num_slots
    common = _common_columns(number)
    num_tokens, most_drafts = message.num_tokens, message.most_drafts
    # What is made here is made by place: by name it takes longer.
    columns = SlotColumns(
        before.phase,
        frozen(before.num_tokens + num_tokens),
        cumulative_of_all(before.cumulative_logprob, message),
        before.outcomes.after_all(message.num_drafts, num_tokens, most_drafts),
        before.tail,
        before.num_prompt,
    )
    batch = RecordBatch(
        message.step,
        state.admitted.requests,
        common.slots,
        message.generation,
        num_tokens,
        message.num_drafts,
        num_tokens - common.ones,  # accepted
        columns.cumulative_logprob,
        common.no_reason,
        common.no_stop,
        common.no_reschedule,
        message,
        row_format=state.admitted.row_format,
    )
    after = ProcessorState(
        state.process_rank,
        message.step + 1,
        state.admitted,
        columns,
        None,  # nothing waits
        None,
        state.past,
        state.counters,
        state.num_drafts,
        state.outlook,
        state.room - (most_drafts + 1),
    )
    return after, batch


class _CommonColumns(NamedTuple):
    """Columns that the records of a usual step have in common, whatever came."""

    slots: NDArray[np.int64]
    ones: NDArray[np.int64]
    no_reason: NDArray[np.int8]
    no_stop: NDArray[np.int64]
    no_reschedule: NDArray[np.bool_]


@functools.lru_cache(16)
def _common_columns(number: int) -> _CommonColumns:
    return _CommonColumns(
        all_slots(number),
        all_equal(1, number),
        frozen(np.zeros(number, np.int8)),
        all_equal(-1, number),
        frozen(np.zeros(number, np.bool_)),
    )
