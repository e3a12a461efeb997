"""The columns of one step's records. Never jax."""

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records.decode import Message
from jax_specdec.records.statistics import Statistics
from jax_specdec.requests import Request


class FinishReason(IntEnum):
    """Why a request ended; 0 stands for "it goes on" in columns and is None in a record."""

    STOP_TOKEN = 1
    STOP_SEQUENCE = 2
    LENGTH = 3
    ABORT = 4
    RECOVERY_ERROR = 5
    PREFILL_HANDOVER = 6
    WORKER_LOST = 7


@dataclass(frozen=True, slots=True, eq=False)
class StatisticsSource:
    """The columns that statistics of a slot come from, as they stood after a step.

    Attributes:
      num_tokens: [B] int64, tokens delivered in this slot.
      outcomes: [B, 3, D+1] int64, the histograms of `Statistics` in its order.
      earlier: [B] what the slots' requests brought along.
    """

    num_tokens: NDArray[np.int64]
    outcomes: NDArray[np.int64]
    earlier: tuple[Statistics, ...]

    def of(self, slot: int) -> Statistics:
        """Of the slot's request, with what it brought along."""
        return self.earlier[slot] + self.of_stay(slot)

    def of_stay(self, slot: int) -> Statistics:
        """Of the slot's request since it was admitted here."""
        proposed, rejected, accepted = map(_trimmed, self.outcomes[slot])
        return Statistics(proposed, rejected, accepted, int(self.num_tokens[slot]))

    def of_all(self) -> Statistics:
        """Of all stays; nothing that was brought along, which another ring has counted."""
        proposed, rejected, accepted = map(_trimmed, self.outcomes.sum(axis=0))
        return Statistics(proposed, rejected, accepted, int(self.num_tokens.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """The logprobs of n prompt tokens, each given those before it; read-only views.

    Attributes:
      start: the first one's place in the prompt; 1 at the least, as nothing predicts the first.
      token_ids: [n] int32.
      logprobs: [n, K+1] float32, the token itself first, then the top K.
      chosen_logprobs: [n, C] float32, of the request's `extra_token_ids`.
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
class RecordBatch:
    """The records of one step, one row a request; axes: N records, B slots.

    Attributes:
      step: the step that the records are of; for an abort, the last step that came.
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
      message: the target message; None for records that no message caused (an abort).
      draft: the draft message of the step, where one was joined.
      joined: [N] bool, records that have drafts in `draft`.
      row_format: [N] int64, what the rows of these drafts must look like; see `processor_state`.
      totals: statistics' columns; only where some record of the batch ends its stay in a slot.
      prompt: the message of kind PROMPT, where the records are a prompt's logprobs.
      prompt_start: [N] int64, the place in the prompt of each record's first row, from 1.
      prompt_skip: [N] int64, rows of the message's slot before that one.
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
    prompt: Message | None = None
    prompt_start: NDArray[np.int64] | None = None
    prompt_skip: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.slots)

    def prompt_rows(self, row: int) -> PromptRows | None:
        """What record `row` has of its prompt's logprobs."""
        if self.prompt is None or self.prompt_start is None or self.prompt_skip is None:
            return None
        slot, skip = int(self.slots[row]), int(self.prompt_skip[row])
        said, columns = self.prompt.slot(slot), int(self.prompt.columns[slot])
        return PromptRows(
            start=int(self.prompt_start[row]),
            token_ids=said.token_ids[skip:],
            logprobs=said.logprobs[skip:, :columns],
            chosen_logprobs=said.logprobs[skip:, columns:],
            token_ranks=said.token_ranks[skip:],
            topk_ids=said.topk_ids[skip:],
        )

    def take(self, rows: NDArray[np.intp]) -> "RecordBatch":
        """The batch with only these rows; the rare way (an abort while records wait)."""
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in _ROW_COLUMNS},
            joined=None if self.joined is None else self.joined[rows],
            row_format=None if self.row_format is None else self.row_format[rows],
        )


_ROW_COLUMNS = (
    "slots",
    "generation",
    "num_tokens",
    "num_drafts",
    "num_accepted",
    "cumulative_logprob",
    "finish_reason",
    "stop_index",
    "reschedule",
)


def _trimmed(histogram: NDArray[np.int64]) -> tuple[int, ...]:
    """A histogram [n] without its trailing zeros."""
    filled = np.flatnonzero(histogram)
    return tuple(histogram[: filled[-1] + 1].tolist()) if filled.size else ()
