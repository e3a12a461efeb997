"""The consumer's side of the ring. `ipc.protocol` explains the protocol and the labels."""

import select
import zlib
from collections.abc import AsyncIterator, Iterator
from os import getpid
from time import monotonic_ns
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from ipc import segment_layout as layout
from ipc.counters import RingCounters
from ipc.endpoint import Endpoint
from ipc.errors import CorruptMessage, EndOfStream, PeerDied, RingError, RingTimeout
from ipc.field_docs import with_field_docs
from ipc.os_errors import explained
from ipc.peers import PeerWatch
from ipc.waiting import SLICE_NS, deadline_after

_DESCRIPTOR_FLAGS = (0, layout.FLAG_END, layout.FLAG_END | layout.FLAG_DROPPED)


@with_field_docs
class ReceivedMessage(NamedTuple):
    """One message, owned by the receiver.

    Attributes:
      data: the payload, a copy. np.frombuffer(data, dtype) views it as a read-only array.
      sequence: 0, 1, 2, ... without gaps.
      send_time_ns: CLOCK_MONOTONIC at the commit, in ns; the sender's claim.
      receive_time_ns: CLOCK_MONOTONIC when the copy was complete, in ns.
    """

    data: bytes
    sequence: int
    send_time_ns: int
    receive_time_ns: int


class RingReader(Endpoint):
    """The consumer. One thread at a time; not for forked children.

    Iterating over it, with `for` or `async for`, yields every message up to the end of the stream.
    """

    _role = layout.Role.CONSUMER
    _undelivered: ReceivedMessage | None = None
    _over: RingError | None = None
    _next_look_ns = 0
    _epoll: select.epoll | None = None

    def receive(self, timeout: float | None = None) -> ReceivedMessage:
        """Returns the next message.

        Args:
          timeout: seconds to wait; None waits as long as the producer lives.

        Raises:
          RingTimeout: no message came in time.
          EndOfStream: the producer closed its side, and every message was delivered.
          PeerDied: the producer died; every message that it had committed was delivered.
          CorruptMessage: the shared memory holds bytes that no producer of this session wrote.
        """
        if getpid() != self._pid or self._closed or self._busy:
            self._refuse()
        self._busy = True
        try:
            if self._undelivered is None:
                if self._over is not None:
                    raise self._over.with_traceback(None)
                deadline = None if timeout is None else deadline_after(timeout)
                if not self._items.take(deadline):
                    raise RingTimeout(f"no message within {timeout} s")
                self._read_message()
            return self._hand_out()
        finally:
            self._busy = False

    def try_receive(self) -> ReceivedMessage | None:
        """Returns the next message if one is there, else None.

        Costs less than receive(timeout=0), which raises if no message is there. Raises as
        receive() does when no message can come any more.
        """
        self._begin()
        try:
            if self._undelivered is None:
                if self._over is not None:
                    raise self._over.with_traceback(None)
                if not self._items.held and not self._items.grab() and not self._glance():
                    return None
                self._read_message()
            return self._hand_out()
        finally:
            self._busy = False

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yields every message up to the end of the stream."""
        while True:
            try:
                message = self.receive()
            except EndOfStream:
                return
            yield message

    async def receive_async(self) -> ReceivedMessage:
        """Returns the next message in an asyncio program. Needs doorbell=True.

        Never blocks the event loop, and raises as receive() does. Several tasks may await one
        ring: each message goes to one of them. Cancelling a task loses no message.
        """
        from ipc import aio  # imports asyncio, which only asyncio programs should pay for

        return await aio.receive(self)

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yields every message in an asyncio program. Needs doorbell=True."""
        from ipc import aio

        return aio.messages(self)

    def ready(self) -> bool:
        """Says, at the cost of one load, whether try_receive() has a message or an error now."""
        return bool(
            self._undelivered is not None
            or self._over is not None
            or self._items.held
            or (not self._closed and self._segment.semaphores["items"].value)
        )

    def fileno(self) -> int:
        """Returns a file descriptor that is readable while there may be something to receive.

        It stays the same for the ring's life.

        Raises:
          RingError: the ring was not created with doorbell=True.
          RingClosed: after close().
        """
        if self._closed:
            self._refuse()
        if self._bell is None:
            raise RingError("this ring has no descriptor: create it with doorbell=True")
        if self._epoll is None:
            with explained("make the ring's file descriptor"):
                self._epoll = select.epoll()
            try:
                self._show_on_epoll(self._bell.fileno())
                self._show_death_on_epoll()
            except BaseException:
                epoll, self._epoll = self._epoll, None
                epoll.close()
                raise
        return self._epoll.fileno()

    def _close(self) -> None:
        super()._close()
        if self._epoll is not None:
            self._epoll.close()

    def _replace_watch(self, watch: PeerWatch) -> None:
        super()._replace_watch(watch)
        self._show_death_on_epoll()

    def _show_death_on_epoll(self) -> None:
        if self._epoll is None or self._watch is None or self._bell is None:
            return
        fd = self._watch.fileno()
        if fd is None:
            self._bell.ring()  # it died before
        else:
            self._show_on_epoll(fd)

    def _show_on_epoll(self, fd: int) -> None:
        if self._epoll is not None:
            with explained("watch the ring's descriptors"):
                self._epoll.register(fd, select.EPOLLIN)

    def counters(self) -> RingCounters:
        """Returns this side's numbers."""
        depth = 0 if self._closed else self._segment.semaphores["items"].value
        return self._count(depth, self._items)

    def _glance(self) -> bool:
        """Looks again once the doorbell is quiet, and asks about the peer now and then.

        Returns whether a message came.
        """
        if self._bell is not None:
            self._bell.quiet()
            if self._items.grab():
                return True
        now = monotonic_ns()
        if now < self._next_look_ns and self._bell is None:
            return False
        self._next_look_ns = now + SLICE_NS
        problem = self._obstacle()
        if problem is None:
            return False
        if self._items.grab():
            return True
        raise problem

    def _read_message(self) -> None:
        sequence = self._sequence
        flags, size, sent_ns, checksum, slot = self._read_descriptor(sequence)
        if flags & layout.FLAG_DROPPED:
            pid = self._segment.peer().pid
            self._over = PeerDied("producer", pid, sequence - 1, dropped=True)
        elif flags:
            self._over = EndOfStream(f"the producer closed the ring; messages sent: {sequence}")
        if self._over is not None:
            raise self._over
        data = self._slots[slot][:size].tobytes()
        if self._has_checksum and xxh3_64_intdigest(data) != checksum:
            self._fail(
                f"the payload of message {sequence} has a wrong checksum (bytes in it: {size})"
            )
        message = ReceivedMessage(data, sequence, sent_ns, monotonic_ns())
        self._undelivered = message
        self._sequence = sequence + 1
        self._payload_bytes += size
        self._words[self._my_position] = sequence + 1
        self._items.held = []
        self._post_freed()  # CONSUMED

    def _read_descriptor(self, sequence: int) -> tuple[int, int, int, int, int]:
        """Returns flags, size, send time, checksum and slot of the message, all checked."""
        offset = self._offsets[sequence % self._num_descriptors]
        # COMMITTED: stored before the post that was taken. One copy, then only the copy is used.
        fields, crc = layout.DESCRIPTOR.unpack_from(self._buffer, offset)
        (magic, version, flags, number, session, size, sent_ns, checksum,
         slot) = layout.DESCRIPTOR_FIELDS.unpack(fields)  # fmt: skip
        if (
            crc != zlib.crc32(fields)
            or magic != layout.DESCRIPTOR_MAGIC
            or version != layout.LAYOUT_VERSION
            or flags not in _DESCRIPTOR_FLAGS
            or session != self.session
            or number != sequence
            or size > self.slot_bytes
            or slot >= self.capacity
        ):
            self._fail(
                f"the descriptor of message {sequence} is damaged: magic {magic:#x}, version "
                f"{version}, flags {flags:#x}, sequence {number}, size {size}, slot {slot}, CRC "
                f"{crc:#x}"
            )
        return flags, size, sent_ns, checksum, slot

    def _hand_out(self) -> ReceivedMessage:
        message = self._undelivered
        assert message is not None
        self._undelivered = None
        return message

    def _fail(self, what: str) -> None:
        self._over = CorruptMessage(
            f"{what}. Nothing after it can be trusted: create a new ring and restart the producer"
        )
        raise self._over

    def _last_crossed(self) -> int:
        return self._sequence - 1

    def _say_goodbye(self) -> None:
        self._words[self._my_closed] = 1  # the writer looks at it in every send and wait
