"""How often a lost worker or replica is replaced: so many times within a window."""

from collections.abc import Iterable

MAX_RESTART_DELAY = 30.0  # seconds


class Restarts:
    """The losses that count against one place.

    A loss that is older than the window counts no more. One that is put down to a request is
    forgiven: the place is not to blame.
    """

    def __init__(self, most: int, window: float, delay: float) -> None:
        """Begin without a loss.

        Args:
          most: successors within the window.
          window: seconds.
          delay: seconds before the first successor; each further one within the window waits twice
            as long as the one before, and `MAX_RESTART_DELAY` at most.
        """
        self._most, self._window, self._delay = most, window, delay
        self._charged: dict[int, float] = {}  # when each loss was, by its number

    def charge(self, number: int, now: float) -> None:
        """Count a loss."""
        self._charged[number] = now

    def forgive(self, numbers: Iterable[int]) -> None:
        """Count losses no more."""
        for number in numbers:
            self._charged.pop(number, None)

    def forget(self, now: float) -> None:
        """Count no loss that is as old as the window; for a worker that has taken requests.

        One that never did so does not call it: otherwise a model that takes longer to fail than the
        window lasts would be started for ever.
        """
        old = [number for number, when in self._charged.items() if now - when >= self._window]
        self.forgive(old)

    def __len__(self) -> int:
        """How many losses count."""
        return len(self._charged)

    def allows(self, *, more: int = 0) -> bool:
        """Whether a successor may be started now, after so many more losses."""
        return self._most > 0 and len(self._charged) + more <= self._most

    @property
    def delay(self) -> float:
        """Seconds until the next successor starts."""
        doubled: float = self._delay * 2 ** max(len(self._charged) - 1, 0)
        return min(doubled, MAX_RESTART_DELAY)

    def __str__(self) -> str:
        return f"{len(self._charged)} of {self._most} within {self._window:g} s"
