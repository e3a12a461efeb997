"""The time as an engine sees it; a test has its own."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    """CLOCK_MONOTONIC."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
