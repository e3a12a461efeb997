"""A way to end another thread's wait for messages."""

import contextlib
import os
import threading


class Wakeup:
    """A descriptor that any thread can make readable, for `ipc.wait_readable`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._set = False
        self._lock = threading.Lock()  # or a write could meet a descriptor that was given back

    def set(self) -> None:
        """End the wait that is under way, or else the next one; after `close`, nothing."""
        with self._lock, contextlib.suppress(BlockingIOError):  # it is readable already
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
        self._set = True  # last: whoever clears it finds the descriptor readable

    def clear(self) -> None:
        """Let the next wait last. Look for what was announced afterwards, never before."""
        if self._set:  # mostly it is not: a system call less in each round of an engine
            self._set = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)

    def ready(self) -> bool:
        """Whether it was set since the last `clear`."""
        return self._set

    try_receive = clear  # for `ipc.wait_readable`

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Give the descriptor back. Calling it again does nothing."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
