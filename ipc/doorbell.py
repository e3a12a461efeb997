"""A file descriptor beside the semaphores, for event loops and for waiting on many rings.

Semaphores cannot be polled. With doorbell=True the producer also writes one byte into a FIFO after
every message. A byte says only "look again", so an extra byte costs one look, and a FIFO that is
full needs no more bytes. No wake-up is lost: the producer rings after it posts, and the consumer
empties the FIFO before it looks at the semaphore.
"""

import contextlib
import os

from ipc.errors import RingNotFound
from ipc.os_errors import explained
from ipc.segment_names import bell_path


class Doorbell:
    """One side's end of the ring's FIFO."""

    def __init__(self, name: str) -> None:
        with explained("open the ring's doorbell"):
            try:
                # Both sides open for reading and writing: then neither waits for the other in
                # open(), and a write never raises SIGPIPE.
                self._fd = os.open(bell_path(name), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                raise RingNotFound(f"ring {name} has no doorbell any more: it was closed") from None

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        """Makes the descriptor readable."""
        with contextlib.suppress(BlockingIOError):  # full, hence readable already
            os.write(self._fd, b"!")

    def quiet(self) -> None:
        """Empties the FIFO. Look at the ring afterwards, never before."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fd, 65536)) == 65536:
                pass

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
