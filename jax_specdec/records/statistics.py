"""Statistics of speculation: drafts proposed and accepted, as values.

All numbers follow from three histograms over a step's drafts, so a step adds two numbers for each
slot, whatever the number of drafts. The ratios are those of FastDeploy's token processor, which
calls `conditional_acceptance_at` the single head accept ratio.
"""

from dataclasses import dataclass
from itertools import zip_longest


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


def _added(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


def _above(steps_by_count: tuple[int, ...]) -> tuple[int, ...]:
    """[n] the number of steps with a count above 0, 1, ...; ends with the largest count."""
    above, totals = 0, []
    for steps in reversed(steps_by_count[1:]):
        above += steps
        if above:
            totals.append(above)
    return tuple(reversed(totals))
