"""The columns of one step's records."""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records.decode import Message
from jax_specdec.records.message_views import MessageViews
from jax_specdec.requests import Request


@dataclass(frozen=True)
class Statistics:
    """Acceptance over some steps, of one request or of many; values add with `+`.

    A step counts once for each request that had tokens in it, with all tokens that verification
    emitted: those that a stop then cut were accepted too.

    Attributes:
      steps_by_drafts: steps in which n drafts were proposed, at index n.
      rejected_at: steps whose first rejected draft was the one at position n, at index n.
      all_accepted: steps in which all of n drafts were accepted, at index n.
      num_tokens: tokens delivered after the stop rules, so perhaps fewer than steps + accepted.
    """

    steps_by_drafts: tuple[int, ...] = ()
    rejected_at: tuple[int, ...] = ()
    all_accepted: tuple[int, ...] = ()
    num_tokens: int = 0

    @classmethod
    def of_step(cls, num_drafts: int, num_accepted: int, num_tokens: int) -> "Statistics":
        """Statistics of one step of one request."""
        first = (0,) * num_accepted + (1,)
        ends = {"all_accepted" if num_accepted == num_drafts else "rejected_at": first}
        return cls((0,) * num_drafts + (1,), num_tokens=num_tokens, **ends)

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            _added(self.steps_by_drafts, other.steps_by_drafts),
            _added(self.rejected_at, other.rejected_at),
            _added(self.all_accepted, other.all_accepted),
            self.num_tokens + other.num_tokens,
        )

    @property
    def steps(self) -> int:
        return sum(self.steps_by_drafts)

    @property
    def num_drafts(self) -> int:
        """Drafts proposed."""
        return sum(self.drafts_at)

    @property
    def num_accepted(self) -> int:
        """Drafts accepted."""
        return sum(self.accepted_at)

    @property
    def drafts_at(self) -> tuple[int, ...]:
        """[D] steps that proposed a draft at position 0, 1, ..."""
        return _above(self.steps_by_drafts)

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """[D] steps that accepted the draft at position 0, 1, ..."""
        at = _above(_added(self.rejected_at, self.all_accepted))
        return at + (0,) * (len(self.drafts_at) - len(at))

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """[D] the share of the drafts proposed at a position that was accepted, 0 to 1."""
        pairs = zip(self.accepted_at, self.drafts_at, strict=True)
        return tuple(accepted / drafts for accepted, drafts in pairs)

    @property
    def conditional_acceptance_at(self) -> tuple[float | None, ...]:
        """[D] the share of the drafts reached at a position that was accepted, 0 to 1.

        A draft is reached where all drafts before it were accepted. None where no draft was.
        """
        accepted = self.accepted_at
        reached = _added(accepted, self.rejected_at)
        return tuple(a / r if r else None for a, r in zip(accepted, reached, strict=True))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed drafts, 0 to 1; None before the first draft."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def accept_ratio(self) -> float | None:
        """The share of all emitted tokens that were drafts, 0 to 1; None before a step."""
        return self.num_accepted / (self.steps + self.num_accepted) if self.steps else None

    @property
    def average_accepted_length(self) -> float | None:
        """Mean tokens that a step emits, recovered or bonus token included; None before a step."""
        return 1 + self.num_accepted / self.steps if self.steps else None


@dataclass(frozen=True)
class Counters:
    """Counts of what was not delivered, by reason, and of ends; every number only grows.

    Attributes:
      cut_tokens: tokens behind a stop or the length limit, in the step that ended their request.
      surplus_tokens: tokens of later steps, for a request that had ended or left its slot; rows of
        a prompt's logprobs too.
      late_slots: slots of target messages that were about an older generation.
      late_drafts: slots of draft messages with drafts that no waiting record took, as the record
        was released before or its request had ended.
      finished: requests by finish reason, in the order of `FinishReason`.
      preempted: times that a request was sent back to the scheduler.
    """

    cut_tokens: int = 0
    surplus_tokens: int = 0
    late_slots: int = 0
    late_drafts: int = 0
    finished: tuple[int, ...] = ()
    preempted: int = 0


def _added(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))


def _above(steps_by_count: tuple[int, ...]) -> tuple[int, ...]:
    """[n] the number of steps with a count above 0, 1, ...; ends with the largest count."""
    above, totals = 0, []
    for steps in reversed(steps_by_count[1:]):
        above += steps
        if above:
            totals.append(above)
    return tuple(reversed(totals))


class FinishReason(IntEnum):
    """Why a request ended; a column has 0, and a record None, where the request goes on."""

    STOP_TOKEN = 1
    STOP_SEQUENCE = 2
    LENGTH = 3
    ABORT = 4
    RECOVERY_ERROR = 5
    PREFILL_HANDOVER = 6
    WORKER_LOST = 7
    ATTEMPTS_EXHAUSTED = 8  # workers were lost whenever they had it: perhaps by it
    STOP_STRING = 9  # whoever reads the text found a string that ends it
    DEADLINE = 10


@dataclass(frozen=True, slots=True, eq=False)
class StatisticsSource:
    """The columns that a slot's statistics are made from, as they stood after a step.

    Attributes:
      num_tokens: [B] int64, tokens delivered in this slot.
      outcomes: [B, 3, D+1] int64, the histograms of `Statistics` in its order.
      earlier: [B] the statistics that the slots' requests brought along.
    """

    num_tokens: NDArray[np.int64]
    outcomes: NDArray[np.int64]
    earlier: tuple[Statistics, ...]

    def of(self, slot: int) -> Statistics:
        """Statistics of the slot's request, those that it brought along included."""
        return self.earlier[slot] + self.of_stay(slot)

    def of_stay(self, slot: int) -> Statistics:
        """Statistics of the slot's request since it was admitted here."""
        proposed, rejected, accepted = map(_trimmed, self.outcomes[slot])
        return Statistics(proposed, rejected, accepted, int(self.num_tokens[slot]))

    def of_all(self) -> Statistics:
        """Statistics of all stays; what requests brought along was counted by another ring."""
        proposed, rejected, accepted = map(_trimmed, self.outcomes.sum(axis=0))
        return Statistics(proposed, rejected, accepted, int(self.num_tokens.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """The logprobs of n prompt tokens, each given those before it; read-only views.

    Attributes:
      start: the first token's place in the prompt, from 1: nothing predicts the prompt's first one.
      token_ids: [n] int32.
      logprobs: [n, K+1] float32, the token itself first, then the top K.
      chosen_logprobs: [n, C] float32, of the request's `prompt_extra_token_ids`, each row's own, or
        without these of its `extra_token_ids`.
      token_ranks: [n] int32, 1 is the most likely token, 0 marks an invalid row.
      topk_ids: [n, K] int32, -1 where fewer than K are finite.
    """

    start: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    chosen_logprobs: NDArray[np.float32]
    token_ranks: NDArray[np.int32]
    topk_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunks:
    """The logprobs of prompts that N records deliver.

    Attributes:
      message: of kind PROMPT.
      start: [N] int64, the place in the prompt of each record's first row, from 1.
      skip: [N] int64, rows of the message's slot before that one: they were delivered before.
    """

    message: Message
    start: NDArray[np.int64]
    skip: NDArray[np.int64]

    def take(self, records: NDArray[np.intp]) -> "PromptChunks":
        """The chunks of some of the records."""
        return replace(self, start=self.start[records], skip=self.skip[records])

    def rows(self, row: int, slot: int) -> PromptRows:
        """The rows of record `row`, which is about `slot`."""
        skip, columns = int(self.skip[row]), int(self.message.columns[slot])
        view = self.message.slot(slot)
        return PromptRows(
            start=int(self.start[row]),
            token_ids=view.token_ids[skip:],
            logprobs=view.logprobs[skip:, :columns],
            chosen_logprobs=view.logprobs[skip:, columns:],
            token_ranks=view.token_ranks[skip:],
            topk_ids=view.topk_ids[skip:],
        )


# Not frozen: it would take twice as long to make, and each step makes one.
@dataclass(slots=True, eq=False)
class RecordBatch:
    """The records of one step, one row for each request, which nobody changes.

    Axes: N records, B slots.

    Attributes:
      step: the step of the records; for an abort, the last step that came.
      requests: [B] by slot, as they stood in that step.
      slots: [N] int64, ascending.
      generation: [N] int64.
      num_tokens: [N] int64, tokens delivered (after the stop rules).
      num_drafts: [N] int64, drafts that the step verified.
      num_accepted: [N] int64, drafts that it accepted, also those that a stop then cut.
      cumulative_logprob: [N] float64 after this step; without meaning where none were asked.
      finish_reason: [N] int8 `FinishReason`, 0 where the request goes on.
      stop_index: [N] int64, the stop token's id, or the stop sequence's index; -1 otherwise.
      reschedule: [N] bool, preempted: the request must be scheduled again.
      message: the target message; None for records that no target message caused.
      draft: the draft message of the step, where one was joined.
      joined: [N] bool, records that have drafts in `draft`.
      row_format: [N] int64, what the rows of these drafts must look like; see `processor_state`.
      totals: columns for statistics; only where some record of the batch ends its stay in a slot.
      prompt: the prompts' logprobs, where the records are about these.
      cut_views: `views`, once some record was read.
    """

    step: int
    requests: tuple[Request | None, ...]
    slots: NDArray[np.int64]
    generation: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_drafts: NDArray[np.int64]
    num_accepted: NDArray[np.int64]
    cumulative_logprob: NDArray[np.float64]
    finish_reason: NDArray[np.int8]
    stop_index: NDArray[np.int64]
    reschedule: NDArray[np.bool_]
    message: Message | None
    draft: Message | None = None
    joined: NDArray[np.bool_] | None = None
    row_format: NDArray[np.int64] | None = None
    totals: StatisticsSource | None = None
    prompt: PromptChunks | None = None
    cut_views: MessageViews | None = field(default=None, init=False)

    @property
    def views(self) -> MessageViews | None:
        """The records' values, cut out of the message once; None without a message."""
        views = self.cut_views
        if views is None and self.message is not None:
            views = self.cut_views = MessageViews.of(self.message, self.slots, self.num_tokens)
        return views

    @classmethod
    def without_tokens(
        cls,
        *,
        step: int,
        requests: tuple[Request | None, ...],
        slots: NDArray[np.int64],
        generation: NDArray[np.int64],
        cumulative_logprob: NDArray[np.float64],
        prompt: PromptChunks | None = None,
    ) -> "RecordBatch":
        """Records that no target message caused: a prompt's logprobs, an abort, a lost worker."""
        zeros = np.zeros(len(slots), np.int64)
        return cls(
            step=step,
            requests=requests,
            slots=slots,
            generation=generation,
            num_tokens=zeros,
            num_drafts=zeros,
            num_accepted=zeros,
            cumulative_logprob=cumulative_logprob,
            finish_reason=zeros.astype(np.int8),
            stop_index=zeros - 1,
            reschedule=zeros.astype(np.bool_),
            message=None,
            prompt=prompt,
        )

    @property
    def weights_version(self) -> int | None:
        """Of the weights that made the records' rows; None for records without any."""
        if self.message is not None:
            return self.message.weights_version
        return None if self.prompt is None else self.prompt.message.weights_version

    @property
    def digest(self) -> int:
        """Of what the bits of the records' rows depend on; 0 where they depend on the batch."""
        message = self.message or (self.prompt and self.prompt.message)
        return message.digest if message else 0

    def __len__(self) -> int:
        return len(self.slots)

    def ended(self, reason: FinishReason, totals: StatisticsSource) -> "RecordBatch":
        """The batch with every request ended for `reason`."""
        return replace(
            self,
            finish_reason=np.full(len(self), reason, np.int8),
            reschedule=np.zeros(len(self), np.bool_),
            totals=totals,
        )

    def take(self, rows: NDArray[np.intp]) -> "RecordBatch":
        """The batch with only these rows; slow, for aborts and where several read an engine."""
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in _ROW_COLUMNS},
            joined=None if self.joined is None else self.joined[rows],
            row_format=None if self.row_format is None else self.row_format[rows],
            prompt=None if self.prompt is None else self.prompt.take(rows),
        )


_ROW_COLUMNS = (
    "slots", "generation", "num_tokens", "num_drafts", "num_accepted", "cumulative_logprob",
    "finish_reason", "stop_index", "reschedule",
)  # fmt: skip


def _trimmed(histogram: NDArray[np.int64]) -> tuple[int, ...]:
    """A histogram [n] without its trailing zeros."""
    filled = np.flatnonzero(histogram)
    return tuple(histogram[: filled[-1] + 1].tolist()) if filled.size else ()
