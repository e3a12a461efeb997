"""Requests that end although no message says so: an abort, or the end of a stream. Never jax."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records.batch import FinishReason, RecordBatch, StatisticsSource
from jax_specdec.records.processor_state import Phase, ProcessorState, frozen, totals
from jax_specdec.records.record import Records


def end(
    state: ProcessorState, slots: NDArray[np.intp], reason: FinishReason
) -> tuple[ProcessorState, Records]:
    """End those of `slots` (ascending) that hold a running or preempted request.

    Where a record of it waits for a draft message, that record goes out with the reason; the
    others of that batch keep waiting.
    """
    admitted, columns = state.admitted, state.columns
    phase = columns.phase[slots]
    slots = slots[(phase == Phase.RUNNING) | (phase == Phase.PREEMPTED)]
    if not slots.size:
        return state, Records()
    phase = columns.phase.copy()
    phase[slots] = Phase.ENDED
    columns = replace(columns, phase=frozen(phase))
    source = totals(admitted, columns)
    batches: list[RecordBatch] = []
    waiting = state.waiting
    if waiting is not None:
        current = waiting.generation == admitted.generation[waiting.slots]
        taken = current & np.isin(waiting.slots, slots)
        if taken.any():
            slots = slots[~np.isin(slots, waiting.slots[taken])]
            out, rest = waiting.take(np.flatnonzero(taken)), np.flatnonzero(~taken)
            batches.append(_ended(out, reason, source))
            waiting = waiting.take(rest) if rest.size else None
    if slots.size:
        none = np.zeros(len(slots), np.int64)
        empty = RecordBatch(
            step=(state.next_step or 0) - 1,
            requests=admitted.requests,
            slots=slots,
            generation=admitted.generation[slots],
            num_tokens=none,
            num_drafts=none,
            num_accepted=none,
            cumulative_logprob=columns.cumulative_logprob[slots],
            finish_reason=none.astype(np.int8),
            stop_index=none - 1,
            reschedule=none.astype(np.bool_),
            message=None,
        )
        batches.append(_ended(empty, reason, source))
    num_ended = sum(map(len, batches))
    counts = count_finished(state.counters.finished, np.full(num_ended, reason, np.int8))
    counters = replace(state.counters, finished=counts)
    state = replace(state, columns=columns, waiting=waiting, counters=counters)
    return state, Records(tuple(batches))


def count_finished(finished: tuple[int, ...], reason: NDArray[np.int8]) -> tuple[int, ...]:
    """Requests that finished by `FinishReason`, with N more: `reason` [N], 0 for none."""
    counts = np.bincount(reason, minlength=len(finished) + 1)[1:].tolist()
    return tuple(before + count for before, count in zip(finished, counts, strict=True))


def _ended(batch: RecordBatch, reason: FinishReason, source: StatisticsSource) -> RecordBatch:
    reasons = np.full(len(batch), reason, np.int8)
    going_on = np.zeros(len(batch), np.bool_)
    return replace(batch, finish_reason=reasons, reschedule=going_on, totals=source)
