"""A request between two stays in a slot: its progress, and the log it is taken from."""

from dataclasses import dataclass, field, replace

import numpy as np

from jax_specdec.records.batch import FinishReason, RecordBatch, StatisticsSource
from jax_specdec.records.processor_state import Progress
from jax_specdec.records.record import Records
from jax_specdec.requests import Request


@dataclass(frozen=True, kw_only=True)
class QueuedRequest:
    """A request, its progress so far, and the drafts that a prefill worker left for it.

    Attributes:
      losses: numbers of the workers' losses that it may be to blame for; it got no further since
        the first of them.
      submitted: when it came, in seconds of the engine's clock; None once it has had a token.
      had_slot: it does not wait for its first slot.
      priority: those with a lower one get a slot before it.
      group: what was asked for together with it has the same; empty where nothing was.
    """

    request: Request
    progress: Progress = field(default_factory=Progress)
    draft_token_ids: tuple[int, ...] = ()
    losses: tuple[int, ...] = ()
    submitted: float | None = None
    had_slot: bool = False
    priority: int = 0
    group: str = ""

    @property
    def begun(self) -> bool:
        """Whether any of the request's tokens were delivered."""
        return bool(self.progress.token_ids)

    @property
    def for_worker(self) -> Request:
        """The request for a worker: the emitted tokens join the prompt, and fewer are left.

        Random numbers are keyed by the position in the whole sequence. A greedy request, and one
        without drafts, therefore continues as if the worker had made the first tokens itself. A
        sampled request may meet other drafts than it would have had: then its tokens are other
        draws of the same distribution.
        """
        request, emitted = self.request, self.progress.token_ids
        if not emitted:
            return request
        remaining, least = (
            number - len(emitted)
            for number in (request.params.max_tokens, request.params.min_tokens)
        )
        params = replace(
            request.params, max_tokens=remaining, min_tokens=max(least, 0), prompt_logprobs=None,
            prompt_logprobs_start=0, prompt_extra_token_ids=None,
        )  # fmt: skip
        return request.continued(emitted, params)


class TokenLog:
    """The tokens that each slot's request has emitted; a step is appended for all slots at once.

    Axes: B slots, T tokens of a slot.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._tokens = np.zeros((num_slots, max_length), np.int32)  # [B, T]
        self._lengths = np.zeros(num_slots, np.int64)  # [B]
        self._steps = np.zeros(num_slots, np.int64)  # [B], since a slot's log began

    def start(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """Begin a slot's log with the tokens that its new request brings along."""
        self._tokens[slot, : len(token_ids)] = token_ids
        self._lengths[slot] = len(token_ids)
        self._steps[slot] = 0

    def extend(self, records: Records) -> None:
        """Append the tokens of the slots' records."""
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
            self._steps[slots] += counts > 0

    def tokens(self, slot: int) -> tuple[int, ...]:
        return tuple(self._tokens[slot, : self._lengths[slot]].tolist())

    def steps(self, slot: int) -> int:
        """How many steps have brought tokens since the slot's log began."""
        return int(self._steps[slot])


def handed_on(records: Records) -> Records:
    """The records without the reason `PREFILL_HANDOVER`: a decode worker continues the request."""
    batches = []
    for batch in records.batches:
        handed_over = batch.finish_reason == FinishReason.PREFILL_HANDOVER
        if handed_over.any():
            reasons = np.where(handed_over, np.int8(0), batch.finish_reason)
            batch = replace(batch, finish_reason=reasons)
        batches.append(batch)
    return Records(tuple(batches))


def ended(queued: QueuedRequest, reason: FinishReason) -> Records:
    """The last record of a request that ends while it holds no slot."""
    progress = queued.progress
    no_steps = StatisticsSource(
        num_tokens=np.zeros(1, np.int64),
        outcomes=np.zeros((1, 3, 1), np.int64),
        earlier=(progress.statistics,),
    )
    batch = RecordBatch.without_tokens(
        step=-1,
        requests=(queued.request,),
        slots=np.zeros(1, np.int64),
        generation=np.full(1, -1, np.int64),
        cumulative_logprob=np.array([progress.cumulative_logprob or 0.0]),
    )
    return Records((batch.ended(reason, no_steps),))
