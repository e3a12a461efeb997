"""Whether a process lives: by heartbeats, or by what it does while it cannot send any.

Heartbeats come from a thread of Python's. Code that keeps the interpreter to itself holds them up:
reading a tensor of gigabytes from a slow disk did so for all of the time that it took. Such a
process works, and one that is stopped or waits for ever does not: the kernel counts which.

https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
"""

from collections.abc import Callable
from pathlib import Path

from jax_specdec.control.heartbeat import QuietTimer

LOOK_SECONDS = 1.0  # between two readings of the kernel's counts
LEAST_TICKS = 2  # hundredths of a second of CPU time in between; a thread that waits takes none


class Activity:
    """Whether a process of this host has computed, or read from a disk."""

    def __init__(self, pid: int, directory: Path = Path("/proc")) -> None:
        self._path = directory / str(pid) / "stat"
        self._since: float | None = None  # seconds
        self._before = (0, 0)
        self._works = False

    def look(self, now: float) -> bool:
        """Whether it did between the last two readings; `now` in seconds, monotonic.

        A process that is not here (of another host, or dead) did nothing.
        """
        if self._since is not None and now - self._since < LOOK_SECONDS:
            return self._works
        found = self._read()
        self._works = (
            found is not None
            and self._since is not None
            and (
                found[0] - self._before[0] >= LEAST_TICKS
                or found[1] != self._before[1]
            )
        )  # fmt: skip
        self._since, self._before = now, found or (0, 0)
        return self._works

    def _read(self) -> tuple[int, int] | None:
        """Ticks of CPU time, and pages read from a disk."""
        try:
            fields = self._path.read_bytes().rpartition(b")")[2].split()
            return int(fields[11]) + int(fields[12]), int(fields[9])
        except (OSError, LookupError, ValueError):
            return None


class Liveness:
    """A process, as one hears of it."""

    def __init__(self, pid: int, *, grace: float = 0.0) -> None:
        """Begin with `grace` seconds in which nothing need be heard."""
        self._beats, self._rest = QuietTimer(grace), QuietTimer()
        self.activity: Callable[[float], bool] = Activity(pid).look

    def hear(self) -> None:
        """Note a sign of life between two looks."""
        self._beats.hear()

    def look(self, now: float, *, beat: bool, limit: float) -> bool:
        """Whether the process lives: False after `limit` seconds without a heartbeat.

        The second half of them, it must not have worked either.

        Args:
          now: seconds, monotonic.
          beat: a heartbeat came since the last look.
          limit: seconds.
        """
        self._beats.look(now, sign=beat)
        works = self.activity(now)  # which compares with the time before
        self._rest.look(now, sign=works or self._beats.seconds <= limit / 2)
        return self._beats.seconds <= limit or self._rest.seconds < limit / 2
