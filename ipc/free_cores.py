"""Whether a side may spin: only once it has seen that a core is free for it.

A core is free where the cores that a thread may run on do nothing, or run this thread. /proc/stat
says how long each core has been idle so far, in ticks of 10 ms. A side that blocks needs the answer
to know whether it could spin; one that spins loses its core where it must not.
"""

import io
import os
from collections.abc import Callable
from threading import get_ident
from time import thread_time_ns

FIRST_SPAN_NS = 50_000_000  # so long a core must have been free, a few ticks,
LONGEST_SPAN_NS = 6_400_000_000  # twice as long each time that it is lost soon again, up to this
SOON_SPANS = 20  # soon: within so many spans
FREE_SHARE = 0.75  # of one core, over a span
STALE_SPANS = 4  # nobody waited for so long: the span begins again
STAT = "/proc/stat"
_MOST_BYTES = 1 << 20
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def available_ns() -> int | None:
    """Returns how long this thread has run, or could have run on an idle core, up to now.

    Returns None where /proc/stat does not tell of the cores that it may run on.
    """
    cores = os.sched_getaffinity(0)
    idle = 0
    try:
        for line in _read(STAT).split(b"\n")[1:]:  # the first one is the sum of all cores
            if not line.startswith(b"cpu"):
                break
            name, _, _, _, idles, waits, *_ = line.split()
            if int(name[3:]) in cores:
                idle += int(idles) + int(waits)  # who waits for a disk leaves its core
    except (OSError, ValueError):
        return None
    return idle * _TICK_NS + thread_time_ns()


def _read(path: str) -> bytes:
    # C code alone runs from the opening to the keeping of the file, so that what a signal handler
    # raises leaves none open.
    files: list[io.FileIO] = []
    try:
        files.extend(map(io.FileIO, (path,)))
        return files[0].read(_MOST_BYTES) or b""
    finally:
        for file in files:
            file.close()


class FreeCores:
    """The cores of one side of a ring, as far as it knows; it begins without, and then blocks.

    Attributes:
      spin: a core was free for a whole span, and was not lost since.
    """

    def __init__(self, available: Callable[[], int | None] = available_ns) -> None:
        """Starts without permission; `available` is as `available_ns`."""
        self.spin = False
        self.available = available
        self.span_ns = FIRST_SPAN_NS
        self._freed_ns = 0  # when `spin` became true
        self._begun_ns = 0  # of the span under way; 0 for none
        self._before = 0  # what was available then
        self._thread = 0

    def look(self, now: int) -> bool:
        """Says whether the side may spin; called before each wait, cheap inside of a span."""
        if self.spin:
            return True
        elapsed = now - self._begun_ns
        thread = get_ident()
        stale = elapsed > STALE_SPANS * self.span_ns or thread != self._thread
        if elapsed < self.span_ns and not stale:
            return False
        available = self.available()
        if available is None:
            return False
        if not stale:
            self.spin = available - self._before >= FREE_SHARE * elapsed
            self._freed_ns = now
        self._begun_ns, self._before, self._thread = now, available, thread
        return self.spin

    def lost(self, now: int) -> None:
        """Notes that this side lost its core while it spun."""
        soon = now - self._freed_ns < SOON_SPANS * self.span_ns
        self.span_ns = min(2 * self.span_ns, LONGEST_SPAN_NS) if soon else FIRST_SPAN_NS
        self.spin = False
        self._begun_ns = 0
