"""How long things take, as histograms: of an engine since its start.

A message's values are taken together, as columns: 256 records cost about as much as one.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# Upper bounds of the buckets in seconds; a last bucket without a bound follows.
BOUNDS = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_BOUNDS = np.array(BOUNDS)


class Histogram:
    """Counts of durations by bucket.

    Attributes:
      counts: [len(BOUNDS) + 1] durations in each bucket, up to and with its bound.
      total: seconds of all of them.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(len(BOUNDS) + 1, np.int64)
        self.total = 0.0

    def take(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[_BOUNDS.searchsorted(seconds)] += 1
        self.total += seconds

    def take_all(self, seconds: NDArray[np.float64], times: NDArray[np.int64]) -> None:
        """Count each duration as often as `times` says; both are [N]."""
        np.add.at(self.counts, _BOUNDS.searchsorted(seconds), times)
        self.total += float(seconds @ times)


@dataclass(frozen=True)
class Timings:
    """An engine's histograms.

    Attributes:
      queue: from a request's submission to its first slot.
      first_token: from there to its first token.
      between_tokens: between two tokens of a request; those of one step share its duration evenly.
      ring: from a worker's commit of a message to the engine's copy.
      step: between two messages of a worker that has requests.
    """

    queue: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    ring: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)


class SlotTimes:
    """When the requests in a worker's slots were last heard of.

    Axes: B slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._last = np.full(num_slots, np.nan)  # [B] seconds; nan: not known
        self._fresh = np.zeros(num_slots, np.bool_)  # [B] no token yet: `_last` is its submission
        self._message: float | None = None

    def admit(self, slot: int, submitted: float | None) -> None:
        """A request got a slot; `submitted` is None for one that has had a token elsewhere."""
        if np.isnan(self._last).all():
            self._message = None  # there was nothing to do: the next message ends no step
        self._last[slot] = np.nan if submitted is None else submitted
        self._fresh[slot] = submitted is not None

    def leave(self, slot: int) -> float | None:
        """A request left its slot; returns its submission where it has had no token."""
        submitted = float(self._last[slot]) if self._fresh[slot] else None
        self._last[slot], self._fresh[slot] = np.nan, False
        return submitted

    def tokens(
        self, slots: NDArray[np.intp], counts: NDArray[np.integer], now: float, timings: Timings
    ) -> None:
        """Tokens came for `slots`, `counts` of them; both are [N], counts above 0."""
        spent = now - self._last[slots]
        fresh = self._fresh[slots]
        if fresh.any():
            timings.first_token.take_all(spent[fresh], np.ones(int(fresh.sum()), np.int64))
            self._fresh[slots] = False
        is_known = ~fresh & ~np.isnan(spent)
        if is_known.any():
            times = counts[is_known].astype(np.int64)
            timings.between_tokens.take_all(spent[is_known] / times, times)
        self._last[slots] = now

    def message(self, now: float, timings: Timings) -> None:
        """A step's message came."""
        if self._message is not None:
            timings.step.take(now - self._message)
        self._message = now
