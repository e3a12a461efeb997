"""Where a request stands between two stays in a slot: values, and functions of them. Never jax."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records.batch import FinishReason, RecordBatch, StatisticsSource
from jax_specdec.records.processor_state import Progress
from jax_specdec.records.record import Records
from jax_specdec.requests import Request


@dataclass(frozen=True, kw_only=True)
class QueuedRequest:
    """A request, what has been delivered of it, and the drafts that a prefill worker left it."""

    request: Request
    progress: Progress = field(default_factory=Progress)
    draft_token_ids: tuple[int, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether any of its tokens were delivered."""
        return bool(self.progress.token_ids)

    @property
    def for_worker(self) -> Request:
        """What a worker runs: the emitted tokens are part of the prompt, and fewer are left.

        Random numbers are keyed by the position in the whole sequence. So the tokens go on as if
        the worker had made the first ones itself where the request is greedy or nothing is
        drafted; otherwise, with other drafts to accept, as other draws of the same distribution.
        """
        request, emitted = self.request, self.progress.token_ids
        if not emitted:
            return request
        left = request.params.max_tokens - len(emitted)
        return replace(
            request,
            prompt_token_ids=request.prompt_token_ids + emitted,
            params=replace(request.params, max_tokens=left, prompt_logprobs=None),
        )


class TokenLog:
    """What each slot's request has emitted; a step is written a column at a time.

    Axes: B slots, T tokens.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._tokens = np.zeros((num_slots, max_length), np.int32)  # [B, T]
        self._lengths = np.zeros(num_slots, np.int64)  # [B]

    def start(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """Begin with what the slot's new request brings along."""
        self._tokens[slot, : len(token_ids)] = token_ids
        self._lengths[slot] = len(token_ids)

    def extend(self, records: Records) -> None:
        """Append the tokens of records of the slots' requests."""
        for batch in records.batches:
            message, slots, counts = batch.message, batch.slots, batch.num_tokens
            if message is None:
                continue
            ends = counts.cumsum()
            within = np.arange(ends[-1] if ends.size else 0) - (ends - counts).repeat(counts)
            source = message.token_start[slots].repeat(counts) + within
            places = self._lengths[slots].repeat(counts) + within
            self._tokens[slots.repeat(counts), places] = message.token_ids[source]
            self._lengths[slots] += counts

    def tokens(self, slot: int) -> tuple[int, ...]:
        return tuple(self._tokens[slot, : self._lengths[slot]].tolist())


def handed_on(records: Records) -> Records:
    """The records with no end where a request is only handed over: somebody goes on with it."""
    batches = []
    for batch in records.batches:
        handed_over = batch.finish_reason == FinishReason.PREFILL_HANDOVER
        if handed_over.any():
            reasons = np.where(handed_over, np.int8(0), batch.finish_reason)
            batch = replace(batch, finish_reason=reasons)
        batches.append(batch)
    return Records(tuple(batches))


def ended(job: QueuedRequest, reason: FinishReason) -> Records:
    """The one record that ends a request which holds no slot."""
    none: NDArray[np.int64] = np.zeros(1, np.int64)
    progress = job.progress
    totals = StatisticsSource(none, np.zeros((1, 3, 1), np.int64), (progress.statistics,))
    return Records(
        (
            RecordBatch(
                step=-1,
                requests=(job.request,),
                slots=none,
                generation=none - 1,
                num_tokens=none,
                num_drafts=none,
                num_accepted=none,
                cumulative_logprob=np.array([progress.cumulative_logprob or 0.0]),
                finish_reason=np.array([reason], np.int8),
                stop_index=none - 1,
                reschedule=none.astype(np.bool_),
                message=None,
                totals=totals,
            ),
        )
    )
