"""Requests that end without a message: an abort, or the end of a stream."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records.batch import FinishReason, RecordBatch
from jax_specdec.records.processor_state import Phase, ProcessorState, frozen, totals
from jax_specdec.records.record import Records


def end(
    state: ProcessorState, slots: NDArray[np.intp], reason: FinishReason
) -> tuple[ProcessorState, Records]:
    """End the running and preempted requests in `slots` (ascending).

    Where a request's record waits for a draft message, that record is released with the reason; the
    other records of its batch keep waiting.
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
    state = replace(state, columns=columns, waiting=waiting, counters=counters)
    return state, Records(tuple(batches))


def count_finished(finished: tuple[int, ...], reason: NDArray[np.int8]) -> tuple[int, ...]:
    """The numbers of finished requests by `FinishReason`, with those of `reason` [N] added."""
    counts = np.bincount(reason, minlength=len(finished) + 1)[1:].tolist()
    return tuple(before + count for before, count in zip(finished, counts, strict=True))
