"""The time as an engine sees it; a test has its own."""

import time


class Clock:
    """CLOCK_MONOTONIC: seconds that only grow."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
