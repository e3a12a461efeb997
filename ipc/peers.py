"""Who a process is, and whether it still lives.

A pid alone proves nothing: the kernel reuses it. A pid with its start time (clock ticks since the
machine booted, proc(5)) names one process of one boot. Both numbers have their meaning in
namespaces: the pid in a pid namespace, the start time in a time namespace (time_namespaces(7)),
whose boot was at another time. So an identity names both, and a process judges only identities of
its own two. `kill(pid, 0)` succeeds on zombies, so a pidfd answers instead (pidfd_open(2), Linux
5.3): it becomes readable at the moment the process ends.
"""

import errno
import os
import select
from dataclasses import dataclass

from ipc.errors import RingError
from ipc.os_errors import explained


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot.

    Attributes:
      pid: process id.
      start_time: clock ticks since boot, field 22 of /proc/PID/stat.
      pid_namespace: inode of the pid namespace in which `pid` has its meaning.
      time_namespace: inode of the time namespace in which `start_time` has; 0 where the kernel has
        none (before Linux 5.6).
    """

    pid: int
    start_time: int
    pid_namespace: int
    time_namespace: int

    def shares_namespaces(self, other: "ProcessIdentity") -> bool:
        """Says whether the numbers of both identities have one meaning."""
        namespaces = self.pid_namespace, self.time_namespace
        return namespaces == (other.pid_namespace, other.time_namespace)


@explained("tell which process this is")
def current_process() -> ProcessIdentity:
    """Returns the identity of the calling process.

    Raises:
      RingError: /proc is missing, or is that of another pid namespace.
    """
    pid = os.getpid()
    try:
        shown = os.readlink("/proc/self")
    except FileNotFoundError:
        shown = "nothing"
    # Behind `unshare --pid` without --mount-proc, /proc/PID is some other process.
    start_time = process_start_time(pid) if shown == str(pid) else None
    if start_time is None:
        raise RingError(
            f"this process is {pid}, but /proc/self is {shown}: mount the /proc of this pid "
            "namespace, which tells the ring's processes apart"
        )
    return ProcessIdentity(pid, start_time, _namespace("pid"), _namespace("time"))


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
        self._fd: int | None = None
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
    """Says whether this very process still runs. Only for identities of this one's namespaces."""
    watch = PeerWatch(identity)
    try:
        return watch.alive()
    finally:
        watch.close()


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except FileNotFoundError:
        return 0


@explained("watch the other side's process")
def _open_pidfd(identity: ProcessIdentity) -> int | None:
    # A pid read from damaged memory may be any number; no process has one outside of pid_t.
    if not 0 < identity.pid < 1 << 31:
        return None
    try:
        fd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        # The number is that of a thread of another process by now: EINVAL, on Linux 6.18 ENOENT.
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        raise RingError(
            f"pidfd_open({identity.pid}) failed ({error}): to notice a dead peer, the ring needs "
            "Linux 5.3 or newer and a sandbox that permits this call"
        ) from error
    # The fd pins the process. Only now does the start time prove that it is the right one.
    try:
        if process_start_time(identity.pid) == identity.start_time:
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
