"""Waiting for many rings in one thread.

The rings must have been created with doorbell=True. A ring's descriptor is readable while there
may be something to receive: a message, the end of the stream, or the peer's death.

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
    """The part of RingReader that is used here."""

    def fileno(self) -> int: ...

    def ready(self) -> bool: ...

    def try_receive(self) -> MessageT_co | None: ...


ReaderT = TypeVar("ReaderT", bound=Pollable)


def wait_readable(readers: Sequence[ReaderT], timeout: float | None = None) -> list[ReaderT]:
    """Waits until at least one reader may have something, and returns those, in their order.

    A returned reader's try_receive() returns a message, raises what receive() would raise, or
    now and then returns None (a doorbell only says "look"). The list is empty after `timeout`
    seconds (None: no limit). Raises RingError for a ring without a doorbell, RingClosed for one
    that this process closed, and where nothing could ever end the wait: no readers and no limit.
    """
    if not readers and timeout is None:
        raise RingError("no readers and no timeout: nothing would end the wait")
    ready = [reader for reader in readers if reader.ready()]
    if ready:
        return ready
    poll = select.poll()
    by_fd = {reader.fileno(): reader for reader in readers}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    readable = {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}
    return [reader for fd, reader in by_fd.items() if fd in readable]
