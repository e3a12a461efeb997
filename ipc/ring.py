"""A ring of messages between one producer and one consumer, in shared memory.

    producer                          slots                          consumer
    send() ----- copy in ----> [0][1][2]...[N-1][spare] ---- copy out -----> receive()

    free   (N)  acquire: may fill one slot                  release: slot is free again
    items  (0)  release: one message is complete            acquire: may read one message

The two semaphores are the only synchronisation: sem_post is a release and sem_wait an acquire
(POSIX, glibc), on weakly ordered CPUs too. Nothing is ever decided by a plain load of a shared
word. Both ends of each ordering edge carry one label in the code:

    COMMITTED  payload and header are stored before `items` is posted; read after it is taken
    CONSUMED   the payload was copied out before `free` is posted; overwritten after it is taken
    GOODBYE    the consumer's closed word is stored before an extra post of `free`

Message number s (0, 1, 2, ...; it never wraps) lives in slot s mod (N + 1). At most N messages
are in flight, so the slot of the next one is always free: the end of stream goes there without
taking a credit, and close() never waits.

    state of message s        who may touch its slot   left by
    free                      producer                 free.acquire (not for the end of stream)
    being written             producer                 items.release                 COMMITTED
    committed                 nobody                   items.acquire
    being read                consumer                 free.release                  CONSUMED
    free, for s + N + 1       producer

A process that is killed leaves its message in one of these states, and the ring is never
repaired: what was committed is still delivered, then the reader gets PeerDied. A restart is a new
ring (`RingReader.successor`).

What a signal handler raises (KeyboardInterrupt, SystemExit) passes through send() and receive()
and leaves the ring in order: CPython runs handlers after calls and at jumps, so each commit below
is a run of plain assignments followed by the one call that publishes it. After an interrupted
send(), `counters().messages` says whether that message was sent. An interrupted receive() that
had taken a message hands it out at the next call.
"""

import zlib
from collections.abc import Iterator
from time import monotonic_ns
from typing import NamedTuple

import numpy as np

from ipc.errors import (
    CorruptMessage,
    EndOfStream,
    MessageTooLarge,
    PeerClosed,
    RingError,
    RingFull,
    RingTimeout,
)
from ipc.layout import (
    FLAG_CHECKSUM,
    FLAG_DOORBELL,
    FLAG_END,
    SLOT_FIELDS,
    SLOT_HEADER,
    SLOT_MAGIC,
    VERSION,
    Role,
)
from ipc.side import RingCounters, Side
from ipc.waiting import SLICE_NS, deadline_after

__all__ = ["ReceivedMessage", "RingCounters", "RingReader", "RingWriter"]


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


class RingWriter(Side):
    """The producer. One thread at a time; not for forked children."""

    _role = Role.PRODUCER
    _bell_owed = False
    _next_look_ns = 0
    _ended = False

    def send(self, *parts: object, timeout: float | None = None) -> int:
        """Sends one message: the bytes of `parts`, one after the other.

        Args:
          parts: bytes-like objects or C-contiguous ndarrays of any dtype. They are copied before
            send() returns, so they may be reused at once.
          timeout: seconds to wait while the ring is full; None waits as long as the consumer
            lives, 0 raises at once.

        Returns the message's sequence number.

        Raises:
          RingFull: no slot became free in time. Nothing was sent.
          MessageTooLarge: the parts exceed slot_bytes. Nothing was sent.
          PeerClosed, PeerDied: the consumer is gone.
          TypeError, ValueError: a part has no buffer, or is not contiguous.
        """
        self._begin()
        try:
            views = [_as_bytes(part) for part in parts]
            size = sum(map(len, views))
            if size > self._slot_bytes:
                raise MessageTooLarge(size, self._slot_bytes)
            if not self._free.take(deadline_after(timeout)):
                raise RingFull(
                    f"all {self.capacity} slots were full for {timeout} s: the consumer is behind"
                )
            if self._words[self._peer_closed]:  # GOODBYE
                raise PeerClosed(f"the consumer closed ring {self.name}")
            now = monotonic_ns()
            if now >= self._next_look_ns:
                # A ring that never fills up would not notice a dead consumer for long.
                self._next_look_ns = now + SLICE_NS
                self._raise_if_hopeless()
            return self._commit(views, size, 0)
        finally:
            self._busy = False

    def counters(self) -> RingCounters:
        """Returns this side's numbers."""
        depth = 0 if self._closed else self._sequence - self._peer_progress()
        return self._count(depth, self._free)

    def _commit(self, views: list[memoryview], size: int, flags: int) -> int:
        sequence = self._sequence
        index = sequence % self._physical_slots
        payload = self._payloads[index]
        start = 0
        for view in views:
            end = start + len(view)
            payload[start:end] = view  # CONSUMED: the slot's last reader is done
            start = end
        checksum = 0 if self._digest is None else self._digest(payload[:size])
        fields = SLOT_FIELDS.pack(
            SLOT_MAGIC, VERSION, flags, sequence, self._session, size, monotonic_ns(), checksum
        )
        SLOT_HEADER.pack_into(self._buffer, self._offsets[index], fields, zlib.crc32(fields))
        self._sequence = sequence + 1
        self._payload_bytes += size
        self._ended = flags == FLAG_END
        self._bell_owed = self._bell is not None
        self._free.held = []
        self._post_items()  # COMMITTED
        if self._bell_owed:
            self._ring_bell()
        return sequence

    def _ring_bell(self) -> None:
        if self._bell is not None:
            self._bell.ring()
        self._bell_owed = False

    def _peer_progress(self) -> int:
        # The consumer's word, hence a claim: it can never be more than was sent.
        return min(self._words[self._peer_position], self._sequence)

    def _last_crossed(self) -> int:
        return self._peer_progress() - 1

    def _obstacle(self) -> Exception | None:
        if self._words[self._peer_closed]:
            return PeerClosed(f"the consumer closed ring {self.name}")
        return super()._obstacle()

    def _raise_if_hopeless(self) -> None:
        problem = self._obstacle()
        if problem is not None:
            raise problem

    def _say_goodbye(self) -> None:
        if not self._ended:
            self._commit([], 0, FLAG_END)
        if self._bell_owed:
            self._ring_bell()


class RingReader(Side):
    """The consumer. One thread at a time; not for forked children."""

    _role = Role.CONSUMER
    _undelivered: ReceivedMessage | None = None
    _over: RingError | None = None
    _next_look_ns = 0
    _said_goodbye = False

    def receive(self, timeout: float | None = None) -> ReceivedMessage:
        """Returns the next message, waiting up to `timeout` seconds (None: as long as it takes).

        Raises:
          RingTimeout: nothing came in time.
          EndOfStream: the producer closed its side and everything was delivered.
          PeerDied: the producer died; everything that it had committed was delivered.
          CorruptMessage: the shared memory holds what no producer of this session wrote.
        """
        self._begin()
        try:
            if self._undelivered is None:
                if self._over is not None:
                    raise self._over.with_traceback(None)
                if not self._items.take(deadline_after(timeout)):
                    raise RingTimeout(f"no message within {timeout} s")
                self._read_slot()
            return self._hand_out()
        finally:
            self._busy = False

    def try_receive(self) -> ReceivedMessage | None:
        """Returns the next message if one is there, else None: receive(timeout=0) without the
        cost of an exception. Raises as receive() does when nothing more can come."""
        self._begin()
        try:
            if self._undelivered is None:
                if self._over is not None:
                    raise self._over.with_traceback(None)
                if not self._items.held and not self._items.grab() and not self._glance():
                    return None
                self._read_slot()
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

    def successor(self) -> "RingReader":
        """Closes this ring and creates an empty one of the same shape, for a restarted producer.

        Pass the new ring's name to the new producer; `wait_attached` waits for it.
        """
        geometry = self._segment.header.geometry
        flags = self._segment.header.flags
        self.close()
        return RingReader.create(
            geometry.num_slots,
            geometry.slot_bytes,
            wait=self._wait_policy,
            checksum=bool(flags & FLAG_CHECKSUM),
            doorbell=bool(flags & FLAG_DOORBELL),
        )

    def counters(self) -> RingCounters:
        """Returns this side's numbers."""
        depth = 0 if self._closed else self._segment.semaphores["items"].value
        return self._count(depth, self._items)

    def _glance(self) -> bool:
        """Looks again with a quiet doorbell, and at the peer now and then; True if a unit came."""
        if self._bell is not None:
            self._bell.quiet()
            if self._items.grab():
                return True
        now = monotonic_ns()
        if now < self._next_look_ns:
            return False
        self._next_look_ns = now + SLICE_NS
        problem = self._obstacle()
        if problem is None:
            return False
        if self._items.grab():
            return True
        raise problem

    def _read_slot(self) -> None:
        sequence = self._sequence
        index = sequence % self._physical_slots
        # COMMITTED: stored before the post that was taken. One copy, then only the copy is used.
        fields, crc = SLOT_HEADER.unpack_from(self._buffer, self._offsets[index])
        magic, version, flags, number, session, size, sent_ns, checksum = SLOT_FIELDS.unpack(fields)
        if (
            crc != zlib.crc32(fields)
            or magic != SLOT_MAGIC
            or version != VERSION
            or flags & ~FLAG_END
            or session != self._session
            or number != sequence
            or size > self._slot_bytes
        ):
            self._fail(
                f"the header of message {sequence} is damaged: magic {magic:#x}, version {version}"
                f", flags {flags:#x}, sequence {number}, {size} bytes, CRC {crc:#x}"
            )
        if flags == FLAG_END:
            self._over = EndOfStream(f"the producer closed the ring after {sequence} messages")
            raise self._over
        data = self._payloads[index][:size].tobytes()
        if self._digest is not None and self._digest(data) != checksum:
            self._fail(f"the payload of message {sequence} ({size} bytes) has a wrong checksum")
        message = ReceivedMessage(data, sequence, sent_ns, monotonic_ns())
        self._undelivered = message
        self._sequence = sequence + 1
        self._payload_bytes += size
        self._words[self._my_position] = sequence + 1
        self._items.held = []
        self._post_free()  # CONSUMED

    def _hand_out(self) -> ReceivedMessage:
        message = self._undelivered
        assert message is not None
        self._undelivered = None
        return message

    def _fail(self, what: str) -> None:
        self._over = CorruptMessage(f"{what}. Nothing after it can be trusted: the ring is over")
        raise self._over

    def _last_crossed(self) -> int:
        return self._sequence - 1

    def _say_goodbye(self) -> None:
        if not self._said_goodbye:
            self._words[self._my_closed] = 1
            self._said_goodbye = True
            self._post_free()  # GOODBYE


def _as_bytes(part: object) -> memoryview:
    if isinstance(part, np.ndarray):
        if not part.flags.c_contiguous:
            raise ValueError("an array must be C-contiguous: send np.ascontiguousarray(array)")
        part = part.reshape(-1).view(np.uint8)  # any dtype, bfloat16 too
    view = memoryview(part)  # type: ignore[arg-type]
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise ValueError("a buffer must be C-contiguous: send a copy of it")
    return view.cast("B") if view.nbytes else memoryview(b"")
