"""Waiting for many rings in one thread.

The rings must have been created with doorbell=True. A ring's descriptor is readable while the
reader may have something to receive: a message, the end of the stream, or the peer's death.

    while readers:
        for reader in wait_readable(readers, timeout=1.0):
            message = reader.try_receive()  # one message per ring and round: no ring starves
"""

import select
from collections.abc import Sequence
from typing import Protocol, TypeVar

from ipc.errors import RingError

MessageT_co = TypeVar("MessageT_co", covariant=True)


class Pollable(Protocol[MessageT_co]):
    """The part of RingReader that polling uses."""

    def fileno(self) -> int: ...

    def ready(self) -> bool: ...

    def try_receive(self) -> MessageT_co | None: ...


ReaderT = TypeVar("ReaderT", bound=Pollable)


def wait_readable(readers: Sequence[ReaderT], timeout: float | None = None) -> list[ReaderT]:
    """Waits until a reader may have something, and returns all such readers in their order.

    A returned reader's try_receive() returns a message, raises what receive() would raise, or
    now and then returns None (a doorbell only says "look").

    Args:
      readers: rings created with doorbell=True.
      timeout: seconds after which an empty list is returned; None waits without a limit.

    Raises:
      RingError: a ring has no doorbell, or there are neither readers nor a timeout, so that
        the wait would never end.
      RingClosed: this process closed one of the rings.
    """
    if not readers and timeout is None:
        raise RingError("no readers and no timeout: nothing would end the wait. Pass either")
    ready = [reader for reader in readers if reader.ready()]
    if ready:
        return ready
    poll = select.poll()
    by_fd = {reader.fileno(): reader for reader in readers}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    readable = {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}
    return [reader for fd, reader in by_fd.items() if fd in readable]
