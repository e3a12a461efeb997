"""When the next unit of a semaphore is expected, from the times at which the last ones came.

Arithmetic on times in ns, all of one clock. Nothing here reads the clock or waits: `ipc.waiting`
does both.
"""

LEAD_NS = 400_000  # wake up this long before the expected moment: timers and cores are late
LEAD_DEVIATIONS = 4  # where that moment varies, lead by this many median deviations,
LEAD_SHARE = 16  # but by no more than this share of the interval
LAST_GAPS = 5  # the interval is the median of so many gaps
FIRST_NS = 5_000_000  # the longest first interval: a decode step, or less
NEVER = 1 << 63


class Rhythm:
    """The intervals between units, and the window in which to spin for the next one.

    Attributes:
      unwaited: units that were there at once since the last one that was waited for.
      last_ns: when the last unit that was waited for came; 0 before the first.
      interval_ns: the expected time between two units.
    """

    def __init__(self) -> None:
        self.unwaited = 0
        self.last_ns = 0
        self.interval_ns = 0
        self._gaps: list[int] = []  # the last ones
        self._gap_ns = 0  # the newest gap until it is learned, then 0
        self._lead_ns = LEAD_NS
        self._window = (NEVER, NEVER)
        self._window_of = (0, 0)  # last_ns and unwaited when the window was chosen

    def came(self, now: int) -> None:
        """Notes that a unit came `now`, to a side that waited for it."""
        self._gap_ns = (now - self.last_ns) // (self.unwaited + 1)
        self.last_ns = now
        self.unwaited = 0

    def close_window(self) -> None:
        """Ends the spinning for the next unit."""
        self._window = (NEVER, NEVER)

    def window(self, now: int) -> tuple[int, int]:
        """Returns when to start and when to stop spinning for the next unit."""
        if self.last_ns == 0:
            return NEVER, NEVER
        # One window for each unit: a side that waits for it in many short calls must not spin in
        # every one of them.
        unit = (self.last_ns, self.unwaited)
        if unit != self._window_of:
            self._learn()
            expected = self.last_ns + self.interval_ns * (self.unwaited + 1)
            start = max(now, expected - self._lead_ns)
            self._window, self._window_of = (start, start + 2 * self._lead_ns), unit
        return self._window

    def _learn(self) -> None:
        # Called at the start of a wait, when there is time, and not when a unit has just come.
        if not self._gap_ns:
            return
        gap = self._gap_ns if self._gaps else min(self._gap_ns, FIRST_NS)
        self._gaps = [*self._gaps[1 - LAST_GAPS :], gap]
        self._gap_ns = 0
        # A pause between requests does not move a median, and a new rhythm soon does.
        self.interval_ns = _median(self._gaps)
        deviation = _median([abs(gap - self.interval_ns) for gap in self._gaps])
        lead = min(LEAD_DEVIATIONS * deviation, self.interval_ns // LEAD_SHARE)
        self._lead_ns = max(LEAD_NS, lead)


def _median(values: list[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]
