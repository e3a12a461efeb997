"""How many drafts of each slot the next step verifies: as many as make most tokens in a time.

A step's time depends on its shape, whatever was drafted. So steps have programs of two widths, for
no drafts and for all D. How many tokens one would emit is estimated for each request, by what
became of its drafts. How long one takes is told by steps that follow one another and have another
width each: a machine that is slower for a while slows both. Now and then a step is made for that
alone. A rung that is new begins with what the latest one has told, and the first one with what its
rehearsal did: no request's first steps are made to tell times.

Drafts come right in runs. A request's next draft is right with one probability if the one before it
was, and with another one if not: both are averages over the last tokens. Certain drafts tell
whether they would have been right at any width, so these averages never grow old. Drawn ones tell
it where they are verified, at full steps now and then at least. Those cost passes of a model, so a
step of width 0 draws none, and the first wider step behind it has none to verify: another of its
width follows.

Exactness: a width depends on times, emitted tokens and fates of drafts of earlier steps, never on
the drafts that it limits. Verification corrects for the proposed tokens, given their number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.kinds import StepKind

# By `python -m bench widths`, which simulates texts and a shared machine: each may be halved or
# doubled for less than 2 % of the tokens in a time of any scene, but for the two that it names.
LEAST_CHANGES = 3  # changes to and from a width that tell its time
UNSEEN = 256  # steps without one of a width, after which one is made: less than 0.3 % of the time
RATE = 0.1  # of the latest change in what a width takes; at 0.4 a stall costs up to 4 %
MOST_ERROR = 0.7  # of the logarithm of a time: a step that was held up tells no more; else 2 %
LATEST = 32  # tokens of an average, of those behind a right one and of the others
BETTER = 1.03  # times the tokens in a time: of widths, the one estimated too high is chosen


@dataclass
class DraftHistory:
    """The fates of a request's drafts."""

    generation: int
    after_right: float  # the probability that a draft is right whose predecessor was
    after_wrong: float  # and of one behind a token that none had foretold
    seen_right: int = 4  # tokens of each average; at first, those that its guess counts for
    seen_wrong: int = 4
    is_right: bool = False  # of the last token

    def see(self, fate: int) -> None:
        """Take in what `loop.step.fates_of` tells of a step."""
        rights = [True] * fate if fate >= 0 else [*[True] * ~fate, False]
        for right in rights:
            if self.is_right:
                self.seen_right = min(self.seen_right + 1, LATEST)
                self.after_right += (right - self.after_right) / self.seen_right
            else:
                self.seen_wrong = min(self.seen_wrong + 1, LATEST)
                self.after_wrong += (right - self.after_wrong) / self.seen_wrong
            self.is_right = right

    def expected(self, num_drafts: int) -> float:
        """The tokens that the step after the one under way emits with so many drafts."""
        on = self.after_right if self.is_right else self.after_wrong
        first = on * self.after_right + (1 - on) * self.after_wrong
        return 1 + first * sum(self.after_right**ahead for ahead in range(num_drafts))


@dataclass
class StepWidths:
    """The times of steps, and the estimates of each slot.

    Attributes:
      num_drafts: D.
      certain: drafts have no q.
    """

    num_drafts: int
    certain: bool
    texts: dict[int, DraftHistory] = field(default_factory=dict)  # by slot
    costs: dict[StepKind, float] = field(
        default_factory=dict
    )  # logarithms of times, up to a constant
    changes: dict[StepKind, int] = field(default_factory=dict)  # that each cost was told by
    steps: int = 0
    last: dict[StepKind, int] = field(default_factory=dict)  # the last step of each kind
    before: tuple[StepKind, float] | None = None  # the last step, and its time
    rungs: dict[StepKind, StepKind] = field(default_factory=dict)  # of each kind, its full width
    told: dict[int | None, StepKind] = field(
        default_factory=dict
    )  # by width, the latest with a time
    latest: StepKind | None = None  # that was chosen
    has_none: bool = False  # it was wider than the one before, which had drawn no drafts for it

    def choose(
        self, kind: StepKind, slots: Sequence[Slot], narrower: Sequence[StepKind]
    ) -> StepKind:
        """The kind of the next step: `kind`, or the same with fewer drafts.

        Args:
          kind: of the slots, at the full width.
          slots: [B].
          narrower: the same with fewer drafts, as far as their programs are there.
        """
        kinds = [*narrower, kind]
        self.begin(kinds)
        chosen = self.cheapest(kinds, slots) if len(kinds) > 1 else kind
        if self.has_none and self.latest in kinds:
            chosen = self.latest
        widened = self.latest is not None and self.latest.num_drafts == 0 != chosen.num_drafts
        self.has_none = widened and not self.certain
        self.steps += 1
        self.last[chosen], self.latest = self.steps, chosen
        return chosen

    def begin(self, kinds: Sequence[StepKind]) -> None:
        """Take in the widths of a rung, the full one last, with the times of the latest rung."""
        full = kinds[-1]
        begins = full not in self.costs and all(kind.num_drafts in self.told for kind in kinds)
        for kind in kinds:
            self.rungs[kind] = full
            if begins:
                self.costs[kind] = self.costs[self.told[kind.num_drafts]]
                self.changes[kind], self.last[kind] = LEAST_CHANGES, self.steps

    def took(self, kind: StepKind, seconds: float | None) -> None:
        """Note how long a step was; None where something else ran too."""
        before, self.before = self.before, None if seconds is None else (kind, seconds)
        if seconds is None:
            return
        of_one_rung = before is not None and self.rungs.get(before[0]) == self.rungs.get(kind)
        if before is None or before[0] == kind or not of_one_rung:
            self.costs.setdefault(kind, math.log(seconds))
            return
        other, told = before[0], math.log(seconds / before[1])
        if not self.changes.get(kind):
            self.costs[kind] = self.costs[other] + told
        error = told - (self.costs[kind] - self.costs[other])
        error = min(max(error, -MOST_ERROR), MOST_ERROR)
        for timed_kind, sign in ((kind, 1), (other, -1)):
            self.changes[timed_kind] = self.changes.get(timed_kind, 0) + 1
            self.costs[timed_kind] += sign * error / 2 * max(RATE, 1 / self.changes[timed_kind])
            if self.changes[timed_kind] >= LEAST_CHANGES:
                self.told[timed_kind.num_drafts] = timed_kind

    def saw(self, generations: Sequence[int], fates: Sequence[int]) -> None:
        """Take in the fates of a step's drafts; `generations` are the slots' as it was launched."""
        for index, (generation, fate) in enumerate(zip(generations, fates, strict=True)):
            text = self.text_of(index, generation)
            text.see(fate)
            self.texts[index] = text

    def text_of(self, index: int, generation: int) -> DraftHistory:
        """A slot's estimates; of a new request, before any token."""
        text = self.texts.get(index)
        if text is not None and text.generation == generation:
            return text
        # A repetition shows before it is drafted for; a model drafts well from the start.
        if self.certain:
            return DraftHistory(generation, 0.5, 0.05, seen_wrong=20)
        return DraftHistory(generation, 0.8, 0.8)

    def cheapest(self, kinds: Sequence[StepKind], slots: Sequence[Slot]) -> StepKind:
        for kind in kinds:
            since, changes = self.steps - self.last.get(kind, 0), self.changes.get(kind, 0)
            if since > (0 if changes < LEAST_CHANGES else UNSEEN):
                return kind
        texts = [
            self.text_of(index, slot.generation)
            for index, slot in enumerate(slots)
            if slot.decoding
        ]

        def pace(kind: StepKind) -> float:
            width = self.num_drafts if kind.num_drafts is None else kind.num_drafts
            return sum(text.expected(width) for text in texts) / math.exp(self.costs[kind])

        best, *wider = [kind for kind in kinds if kind in self.costs] or [kinds[-1]]
        for kind in wider:
            if pace(kind) > BETTER * pace(best):
                best = kind
        return best
