"""The producer's side of the ring. `ipc.protocol` explains the protocol and the labels."""

import contextlib
import sys
import zlib
from os import getpid
from time import monotonic_ns

from xxhash import xxh3_64_intdigest

from ipc import segment_layout as layout
from ipc.counters import RingCounters
from ipc.endpoint import Endpoint
from ipc.errors import MessageTooLarge, PeerClosed, PeerDied, RingClosed, RingFull, Undelivered
from ipc.segment import Segment
from ipc.waiting import SLICE_NS, WaitPolicy, deadline_after


class RingWriter(Endpoint):
    """The producer. One thread at a time; not for forked children."""

    _role = layout.Role.PRODUCER
    _bell_owed = False
    _next_look_ns = 0
    _ended = False
    _was_told = False  # send() has raised PeerDied, which close() need not repeat
    _drain_until: int | None = None  # a time in ns; None: wait for nothing
    _lost: Undelivered | None = None

    def __init__(self, segment: Segment, wait: WaitPolicy) -> None:
        super().__init__(segment, wait)
        self._num_freed = 0  # messages that the consumer is known to be done with
        # A stack of num_slots less the messages in flight; the slot freed last is on top.
        # Both lists are this process's own: no byte of the segment decides where to write.
        self._free_slots = list(range(self.capacity))
        self._slot_of = [0] * self._num_descriptors  # by sequence number mod num_descriptors

    def send(self, *parts: object, timeout: float | None = None) -> int:
        """Sends one message: the bytes of `parts`, one after the other.

        Args:
          parts: bytes-like objects or C-contiguous ndarrays of any dtype. send() copies them, so
            they may be reused at once.
          timeout: seconds to wait while the ring is full; None waits as long as the consumer
            lives, 0 raises at once.

        Returns:
          The message's sequence number: 0, 1, 2, ...

        Raises:
          RingFull: no slot became free in time. Nothing was sent.
          MessageTooLarge: the parts exceed slot_bytes. Nothing was sent.
          PeerClosed, PeerDied: the consumer is gone.
          RingClosed: close() was called, even if a signal handler interrupted it.
          TypeError, ValueError: a part has no buffer, or is not contiguous.
        """
        if getpid() != self._pid or self._closed or self._busy:
            self._refuse()
        self._busy = True
        try:
            if self._ended:  # by a close() that a signal handler interrupted
                raise RingClosed("this producer has ended the stream; create a new ring to go on")
            views = [part if type(part) is bytes else _as_bytes(part) for part in parts]
            size = sum(map(len, views))
            if size > self.slot_bytes:
                raise MessageTooLarge(size, self.slot_bytes)
            if not self._find_room(None if timeout is None else deadline_after(timeout)):
                raise RingFull(
                    f"the ring was full for {timeout} s, all its slots ({self.capacity}) in use: "
                    "wait longer, or create it with more slots"
                )
            if self._words[self._peer_closed]:
                raise PeerClosed(f"the consumer closed ring {self.name}")
            now = monotonic_ns()
            if now >= self._next_look_ns:
                # With free slots, send() never waits and so would not notice a dead consumer.
                self._next_look_ns = now + SLICE_NS
                if (problem := self._obstacle()) is not None:
                    raise problem
            return self._commit(views, size, 0)
        except PeerDied:
            self._was_told = True
            raise
        finally:
            self._busy = False

    def close(self, *, drain: float = 0) -> None:
        """Ends the stream. Calling it again does nothing.

        In a forked child this closes the child's copies of the handles and nothing else.

        Args:
          drain: seconds to wait until the consumer has attached and taken every message. By default
            it waits for nothing: a consumer that has attached gets them all the same.

        Raises:
          Undelivered: messages that no consumer can read any more, as none has attached, or it has
            died and send() has not said so. Even so the ring is closed and its names are gone. An
            exception that is on its way, or being handled, gets this as a note instead.
          ValueError: `drain` is negative or no number; nothing was closed.
        """
        self._drain_until = deadline_after(drain) if drain else None
        self._close()
        self._report(sys.exc_info()[1])

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close()
        self._report(error)

    def _report(self, on_its_way: BaseException | None) -> None:
        lost, self._lost = self._lost, None
        if lost is None:
            return
        if on_its_way is None:
            raise lost
        on_its_way.add_note(str(lost))

    def counters(self) -> RingCounters:
        """Returns this side's numbers."""
        depth = 0 if self._closed else self._sequence - self._peer_progress()
        return self._count(depth, self._freed)

    def _find_room(self, deadline_ns: int | None) -> bool:
        """Puts the slots that came back on the stack; False if no slot is free in time."""
        freed = self._freed
        in_flight = self._sequence - self._num_freed
        freed.gather(in_flight - len(freed.held))
        top = self.capacity - in_flight
        if not freed.held:
            if top:
                return True
            if not freed.take(deadline_ns):
                return False
        until = self._num_freed + len(freed.held)
        for sequence in range(self._num_freed, until):
            self._free_slots[top] = self._slot_of[sequence % self._num_descriptors]
            top += 1
        self._num_freed = until
        freed.held = []
        return True

    def _commit(self, views: list[bytes | memoryview], size: int, flags: int) -> int:
        sequence = self._sequence
        index = sequence % self._num_descriptors
        # The end of stream may find no free slot; without a payload, any number will do.
        slot = self._free_slots[self.capacity - (sequence - self._num_freed) - 1]
        payload = self._slots[slot]
        start = 0
        for view in views:
            end = start + len(view)
            payload[start:end] = view  # CONSUMED: the slot's last reader is done
            start = end
        checksum = xxh3_64_intdigest(payload[:size]) if self._has_checksum else 0
        fields = layout.DESCRIPTOR_FIELDS.pack(
            layout.DESCRIPTOR_MAGIC, layout.LAYOUT_VERSION, flags, sequence, self.session, size,
            monotonic_ns(), checksum, slot,
        )  # fmt: skip
        layout.DESCRIPTOR.pack_into(self._buffer, self._offsets[index], fields, zlib.crc32(fields))
        self._slot_of[index] = slot
        self._sequence = sequence + 1
        self._payload_bytes += size
        self._ended = flags != 0
        self._bell_owed = self._bell is not None
        self._post_items()  # COMMITTED
        if self._bell_owed:
            self._ring_bell()
        return sequence

    def _ring_bell(self) -> None:
        if self._bell is not None:
            self._bell.ring()
        self._bell_owed = False

    def _peer_progress(self) -> int:
        # The consumer's own claim: bounded, as it cannot have taken more than was sent.
        return min(self._words[self._peer_position], self._sequence)

    def _last_crossed(self) -> int:
        return self._peer_progress() - 1

    def _obstacle(self) -> Exception | None:
        if self._words[self._peer_closed]:
            return PeerClosed(f"the consumer closed ring {self.name}")
        return super()._obstacle()

    def _say_dropped(self) -> None:
        if not self._ended:
            self._commit([], 0, layout.FLAG_END | layout.FLAG_DROPPED)

    def _say_goodbye(self) -> None:
        if not self._ended:
            self._commit([], 0, layout.FLAG_END)
        if self._bell_owed:
            self._ring_bell()
        self._drain()
        num_left = self._sequence - 1 - self._peer_progress()  # the end of stream has a number too
        why = self._why_unread(num_left)
        if num_left and why:
            text = f"ring {self.name} was closed with {num_left} undelivered: {why}"
            self._lost = Undelivered(text, num_left)

    def _drain(self) -> None:
        """Waits until the consumer has taken all, is gone, or the time is over."""
        if self._drain_until is None:
            return
        with contextlib.suppress(PeerClosed, PeerDied):
            while (unread := self._sequence - 1 - self._num_freed) > 0:
                self._freed.gather(unread - len(self._freed.held))
                if not self._freed.held and not self._freed.take(self._drain_until):
                    return
                self._num_freed += len(self._freed.held)
                self._freed.held = []

    def _why_unread(self, num_left: int) -> str:
        """Returns why nobody will read what is left; empty where a consumer may, or has closed."""
        if not self._attached and self._segment.take_seat():
            self._segment.say_closed(num_left)
            return (
                "no consumer has attached. Let it attach first, or wait for it with "
                "close(drain=SECONDS)"
            )
        problem = self._obstacle()
        if isinstance(problem, PeerDied) and not self._was_told:
            return f"the consumer (pid {problem.pid}) has ended. Send them through a new ring"
        return ""

    def _dropped_what(self) -> str:
        return "" if self._lost is None else f": {self._lost}"


def _as_bytes(part: object) -> memoryview:
    if getattr(getattr(part, "dtype", None), "hasobject", False):
        raise TypeError("a part of Python objects holds their addresses: give an array of numbers")
    try:
        view = memoryview(part)  # type: ignore[arg-type]
        if view.c_contiguous:
            return view.cast("B") if view.nbytes else memoryview(b"")
    except ValueError:  # a dtype that the buffer protocol or cast() does not know, like bfloat16
        import numpy as np  # the caller has imported it: the part is most likely an array

        if not isinstance(part, np.ndarray):
            raise
        if part.flags.c_contiguous:
            return part.reshape(-1).view(np.uint8).data
    raise ValueError("a part must be C-contiguous: send a copy, np.ascontiguousarray(array)")
