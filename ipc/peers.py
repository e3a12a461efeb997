"""Who a process is, and whether it still lives.

A pid alone proves nothing: the kernel reuses it. A pid with its start time (clock ticks since the
machine booted, proc(5)) names one process of one boot, and only within one pid namespace.
`kill(pid, 0)` succeeds on zombies, so a pidfd answers instead (pidfd_open(2), Linux 5.3): it
becomes readable at the moment the process ends.
"""

import os
import select
from dataclasses import dataclass

from ipc.errors import RingError


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot.

    Attributes:
      pid: process id.
      start_time: clock ticks since boot, field 22 of /proc/PID/stat.
      pid_namespace: inode of the pid namespace in which `pid` has its meaning.
    """

    pid: int
    start_time: int
    pid_namespace: int


def pid_namespace() -> int:
    """Returns the inode of this process's pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def current_process() -> ProcessIdentity:
    """Returns the identity of the calling process."""
    pid = os.getpid()
    start_time = process_start_time(pid)
    if start_time is None:
        raise RingError(
            f"/proc/{pid}/stat is missing: mount /proc, which tells the ring's processes apart"
        )
    return ProcessIdentity(pid, start_time, pid_namespace())


def process_start_time(pid: int) -> int | None:
    """Returns field 22 of /proc/PID/stat, or None when no such process exists."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may hold any bytes: count from its last parenthesis.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class PeerWatch:
    """Watches one process. `alive` costs one poll(2), about 0.3 us."""

    def __init__(self, identity: ProcessIdentity) -> None:
        self.identity = identity
        self._poll = select.poll()
        self._fd = _open_pidfd(identity)
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLIN)

    def alive(self) -> bool:
        """Says whether the process is still running. A zombie has ended."""
        return self._fd is not None and not self._poll.poll(0)

    def fileno(self) -> int | None:
        """Returns the pidfd, readable once the process has ended; None if it ended earlier."""
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def is_alive(identity: ProcessIdentity) -> bool:
    """Says whether this very process still runs. Only for identities of this pid namespace."""
    watch = PeerWatch(identity)
    try:
        return watch.alive()
    finally:
        watch.close()


def _open_pidfd(identity: ProcessIdentity) -> int | None:
    # A pid read from damaged memory may be any number; no process has one outside of pid_t.
    if not 0 < identity.pid < 1 << 31:
        return None
    try:
        fd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise RingError(
            f"pidfd_open({identity.pid}) failed ({error}): to notice a dead peer, the ring needs "
            "Linux 5.3 or newer and a sandbox that permits this call"
        ) from error
    # The fd pins the process. Only now does the start time prove that it is the right one.
    if process_start_time(identity.pid) == identity.start_time:
        return fd
    os.close(fd)
    return None
