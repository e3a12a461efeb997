"""What speculation achieved: drafts proposed and accepted, as values. Never jax.

Everything follows from two histograms, steps by drafts proposed and steps by drafts accepted, so a
step adds two numbers a slot whatever the number of drafts.
"""

from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Statistics:
    """Acceptance over some steps, of one request or of many; values add with `+`.

    A step counts once a request that had tokens in it, with the tokens that verification emitted:
    what a stop then cut was accepted all the same.

    Attributes:
      steps_by_drafts: [D+1] steps in which d drafts were proposed, at index d.
      steps_by_accepted: [A+1] steps in which a drafts were accepted, at index a.
      num_tokens: tokens delivered; after the stop rules, so it can be below steps + accepted.
    """

    steps_by_drafts: tuple[int, ...] = ()
    steps_by_accepted: tuple[int, ...] = ()
    num_tokens: int = 0

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            _added(self.steps_by_drafts, other.steps_by_drafts),
            _added(self.steps_by_accepted, other.steps_by_accepted),
            self.num_tokens + other.num_tokens,
        )

    @property
    def steps(self) -> int:
        return sum(self.steps_by_drafts)

    @property
    def num_drafts(self) -> int:
        """Drafts proposed."""
        return sum(drafts * steps for drafts, steps in enumerate(self.steps_by_drafts))

    @property
    def num_accepted(self) -> int:
        """Drafts accepted."""
        return sum(accepted * steps for accepted, steps in enumerate(self.steps_by_accepted))

    @property
    def accept_ratio(self) -> float | None:
        """Accepted over proposed drafts, 0 to 1; None before the first draft."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def average_accepted_length(self) -> float | None:
        """Tokens that a step emits, the recovered or bonus token included; None before a step."""
        return 1 + self.num_accepted / self.steps if self.steps else None

    @property
    def drafts_at(self) -> tuple[int, ...]:
        """[D] steps that proposed a draft at position 0, 1, ..."""
        return _at_least(self.steps_by_drafts)

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """[D] steps that accepted the draft at position 0, 1, ..."""
        at = _at_least(self.steps_by_accepted)
        return at + (0,) * (len(self.drafts_at) - len(at))

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """[D] of the drafts proposed at a position, the share accepted there."""
        pairs = zip(self.accepted_at, self.drafts_at, strict=True)
        return tuple(accepted / drafts for accepted, drafts in pairs)


@dataclass(frozen=True)
class Counters:
    """What was not delivered, and why; every number only grows.

    Attributes:
      cut_tokens: tokens behind a stop or the length limit, in the step that ended their request.
      surplus_tokens: tokens of later steps, for a request that had ended or left its slot.
      late_slots: slots of target messages that spoke of an older generation.
      late_drafts: slots of draft messages with drafts that no waiting record took: the record was
        released before, or its request had ended.
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


def _at_least(steps_by_count: tuple[int, ...]) -> tuple[int, ...]:
    """[n] how many steps had a count above 0, 1, ...; no position that no step reached."""
    above, totals = 0, []
    for steps in reversed(steps_by_count[1:]):
        above += steps
        if above:
            totals.append(above)
    return tuple(reversed(totals))
