"""The output processor's state: which request holds which slot, and its progress.

Everything is frozen and columnar: arrays are read-only, and every function returns a new state that
shares the unchanged parts. Axes: B slots, D drafts, M remembered tokens.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc import wire
from ipc.field_docs import with_field_docs
from jax_specdec.records import stop_rules
from jax_specdec.records.batch import (
    Counters,
    FinishReason,
    RecordBatch,
    Statistics,
    StatisticsSource,
)
from jax_specdec.records.decode import Message
from jax_specdec.records.outcomes import Outcomes
from jax_specdec.requests import Request

KEPT_FORMAT = 1 << 40  # the bit of `row_format` that says: with kept sets
VALUES_SHIFT = 41  # of the bits that say which values of a row there are
DRAFT_FORMAT = KEPT_FORMAT - 1  # the bits of what rows of drafts have too


class ProcessorError(ValueError):
    """A message or an admission that contradicts the state; says what was expected."""


class StepLost(ProcessorError):
    """The stream has a gap, or a step came twice: names the steps."""


class SlotPhase(IntEnum):
    """The phase of a slot's request."""

    FREE = 0
    RUNNING = 1
    PREEMPTED = 2  # to be scheduled again, under another generation
    ENDED = 3  # finished, and not released yet


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The part of a request that was delivered before: on a prefill node, or before a preemption.

    Attributes:
      token_ids: all its emitted tokens so far; they count for the length limit and for stop
        sequences, and are never delivered again.
      cumulative_logprob: the sum over these tokens, as in their last record; None where no logprobs
        were asked.
      statistics: those of the steps that made the tokens, as in that record.
      num_prompt_rows: rows of the prompt's logprobs that were delivered, where asked for.
    """

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float | None = None
    statistics: Statistics = field(default_factory=Statistics)
    num_prompt_rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """The columns that change only when a slot is given or freed.

    Attributes:
      requests: [B] None in a free slot.
      generation: [B] int64, the slot's last one, also while it is free; -1 before the first.
      limit: [B] int64, tokens in all at which the request ends.
      limit_reason: [B] int8 `FinishReason` for that end.
      row_format: [B] int64, the format that the request's rows must have; see `row_format`.
      handed_over: [B] int64, tokens that the request brought along.
      earlier: [B] the statistics that it brought along; empty in a free slot.
      prompt_due: [B] int64, rows of the prompt's logprobs that must come before its first token.
      prompt_before: [B] int64, the number of them that were delivered in an earlier stay.
      any_prompt_due: whether some `prompt_due` is not 0.
      history: [B] int64, tokens that must be remembered for its stop sequences.
      stop_keys: sorted int64, see `stop_rules`.
    """

    requests: tuple[Request | None, ...]
    generation: NDArray[np.int64]
    limit: NDArray[np.int64]
    limit_reason: NDArray[np.int8]
    row_format: NDArray[np.int64]
    handed_over: NDArray[np.int64]
    earlier: tuple[Statistics, ...]
    prompt_due: NDArray[np.int64]
    prompt_before: NDArray[np.int64]
    any_prompt_due: bool
    history: NDArray[np.int64]
    stop_keys: NDArray[np.int64]


class SlotColumns(NamedTuple):
    """The columns that change with every step.

    Attributes:
      phase: [B] int8 `SlotPhase`.
      num_tokens: [B] int64, tokens in all, those brought along included.
      cumulative_logprob: [B] float64.
      outcomes: of the steps' drafts.
      tail: [B, M] int32, the last tokens, the newest in the last column; valid only where
        `Admitted.history` is not 0.
      num_prompt: [B] int64, rows of the prompt's logprobs that came in this stay.
    """

    phase: NDArray[np.int8]
    num_tokens: NDArray[np.int64]
    cumulative_logprob: NDArray[np.float64]
    outcomes: Outcomes
    tail: NDArray[np.int32]
    num_prompt: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """Facts that a state's requests share where a step may be usual: see `usual_step`.

    It holds for a state as long as `admitted` and `phase` are the state's own: these are replaced,
    and never changed in their place.

    Attributes:
      admitted, phase: those that it is about.
      may_be_usual: whether a step can be; all else has a meaning only then.
      generations: [B] int64, their bytes.
      columns, mode: of all requests.
      stop_ids: the ids in stop rules, whoever's.
    """

    admitted: Admitted
    phase: NDArray[np.int8]
    may_be_usual: bool = False
    generations: bytes = b""
    columns: int = 0
    mode: int = 0
    stop_ids: frozenset[int] = frozenset()

    def is_about(self, admitted: Admitted, columns: SlotColumns) -> bool:
        """Whether it holds for a state."""
        return self.admitted is admitted and self.phase is columns.phase


@with_field_docs
class ProcessorState(NamedTuple):
    """All that the processor knows about one ring.

    Attributes:
      process_rank: the process rank that publishes to this ring.
      next_step: the step of the next target message; None accepts any first step.
      admitted: what changes only when a slot is given or freed.
      columns: what changes with every step.
      waiting: records of the last step, held until its draft message comes.
      early_draft: a draft message that came before its target message.
      past: statistics of the stays that are over, without what requests brought along.
      counters: of what was not delivered, and of ends.
      num_drafts: the most drafts of a slot and step: D of the columns never exceeds it.
      outlook: on the next steps, as the last one left it.
      room: where they may be usual, tokens that every request may have more, at least.
    """

    process_rank: int
    next_step: int | None
    admitted: Admitted
    columns: SlotColumns
    waiting: RecordBatch | None = None
    early_draft: Message | None = None
    past: Statistics = Statistics()
    counters: Counters = Counters(finished=(0,) * len(FinishReason))
    num_drafts: int = wire.MAX_DRAFTS
    outlook: Outlook | None = None
    room: int = 0

    @classmethod
    def empty(
        cls,
        num_slots: int,
        *,
        process_rank: int = 0,
        first_step: int | None = 0,
        num_drafts: int = wire.MAX_DRAFTS,
    ) -> "ProcessorState":
        """The state of `num_slots` free slots, before the first message.

        Args:
          num_slots: the worker's slots; a message with more is refused.
          process_rank: of the worker; a message of another one is refused.
          first_step: a worker numbers its target messages `first_step`, `first_step + 1`, ...; None
            joins a stream that has begun, whose earlier steps are not missed.
          num_drafts: the most drafts that the worker proposes for a slot and step; a message with
            more is refused.
        """
        if num_slots < 1:
            raise ProcessorError(f"num_slots = {num_slots} must be at least 1")
        if not 0 <= num_drafts <= wire.MAX_DRAFTS:
            raise ProcessorError(f"num_drafts = {num_drafts} must be from 0 to {wire.MAX_DRAFTS}")
        integers = frozen(np.zeros(num_slots, np.int64))
        return cls(
            process_rank=process_rank,
            next_step=first_step,
            num_drafts=num_drafts,
            admitted=Admitted(
                requests=(None,) * num_slots,
                generation=frozen(np.full(num_slots, -1, np.int64)),
                limit=integers,
                limit_reason=frozen(np.zeros(num_slots, np.int8)),
                row_format=integers,
                handed_over=integers,
                earlier=(Statistics(),) * num_slots,
                prompt_due=integers,
                prompt_before=integers,
                any_prompt_due=False,
                history=integers,
                stop_keys=stop_rules.no_keys(),
            ),
            columns=SlotColumns(
                phase=frozen(np.zeros(num_slots, np.int8)),
                num_tokens=integers,
                cumulative_logprob=frozen(np.zeros(num_slots)),
                outcomes=Outcomes.none(num_slots),
                tail=frozen(np.zeros((num_slots, 0), np.int32)),
                num_prompt=integers,
            ),
        )

    @property
    def num_slots(self) -> int:
        return len(self.admitted.requests)

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        """Ids of the requests that can still deliver, in slot order."""
        live = np.flatnonzero(self.columns.phase == SlotPhase.RUNNING).tolist()
        return tuple(request.id for slot in live if (request := self.admitted.requests[slot]))

    def slot_statistics(self, slot: int) -> Statistics:
        """Statistics of the request that holds `slot`, those that it brought along included."""
        return totals(self.admitted, self.columns).of(slot)

    @property
    def statistics(self) -> Statistics:
        """Statistics of everything that this ring brought, past and present."""
        return self.past + totals(self.admitted, self.columns).of_all()


def totals(admitted: Admitted, columns: SlotColumns) -> StatisticsSource:
    """The columns that statistics are made from; views, except the token counts."""
    delivered = frozen(columns.num_tokens - admitted.handed_over)
    return StatisticsSource(delivered, columns.outcomes.counted(), admitted.earlier)


def row_format(columns: Any, num_chosen: Any, mode: Any, kept: Any = 0, values: Any = 0) -> Any:
    """One integer for the format of a request's rows; of integers or int64 [B].

    Args:
      columns: K + 1, or 0 without logprobs.
      num_chosen: C.
      mode: `LogprobsMode`.
      kept: whether they have kept sets. Rows of drafts never do.
      values: bits of `RowValue`. Rows of drafts have none.
    """
    return columns | num_chosen << 16 | mode << 32 | kept * KEPT_FORMAT | values << VALUES_SHIFT


def is_newer(generation: Any, than: Any) -> Any:
    """Whether 32-bit counters are ahead by serial-number comparison (RFC 1982); integers or [B]."""
    ahead = (generation - than) & 0xFFFFFFFF
    return (ahead > 0) & (ahead < 1 << 31)


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The same array, read-only from now on."""
    array.setflags(write=False)
    return array
