"""What both sides of a ring share: attaching, watching the peer, ownership, closing."""

from collections.abc import Callable
from dataclasses import dataclass
from os import getpid
from typing import ClassVar, Self

from ipc.doorbell import Doorbell
from ipc.errors import ForeignProcess, PeerDied, RingClosed, RingError, RingInUse, RingTimeout
from ipc.peers import PeerWatch, ProcessIdentity, process_start_time
from ipc.segment import Segment, unlink_names
from ipc.segment_layout import (
    FLAG_CHECKSUM,
    FLAG_DOORBELL,
    LINE_CLOSED,
    LINE_POSITION,
    Geometry,
    Role,
)
from ipc.waiting import Waiter, WaitPolicy, check_policy, deadline_after

DEFAULT_NUM_SLOTS = 16
DEFAULT_SLOT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RingCounters:
    """One side's numbers at one moment. They only grow, except `depth`.

    Attributes:
      messages: sent (writer) or received (reader) so far; also the next sequence number.
      payload_bytes: their payloads together.
      depth: messages in the ring now, sent and not yet received; a hint, it changes all the time.
      capacity: the largest depth.
      waits: calls that could not go on at once: full ring (writer), empty ring (reader).
      wait_ns: time spent in those waits, in ns.
    """

    messages: int
    payload_bytes: int
    depth: int
    capacity: int
    waits: int
    wait_ns: int


class Side:
    """Common part of RingReader and RingWriter; not for direct use."""

    _role: ClassVar[Role]

    def __init__(self, segment: Segment, wait: WaitPolicy) -> None:
        geometry = segment.header.geometry
        other = segment.role.other
        self._segment = segment
        self._pid = segment.me.pid
        self._busy = False
        self._closed = False
        self._sequence = 0
        self._payload_bytes = 0
        self._wait_policy = wait
        self._session = segment.header.session
        self._slot_bytes = geometry.slot_bytes
        self._num_slots = geometry.num_slots
        self._num_descriptors = geometry.num_descriptors
        self._buffer = segment.buffer
        self._words = segment.words
        self._offsets = [geometry.descriptor_offset(i) for i in range(geometry.num_descriptors)]
        self._slots = [
            segment.buffer[geometry.slot_offset(i) :][: geometry.slot_bytes]
            for i in range(geometry.num_slots)
        ]
        self._my_position = (segment.role.line + LINE_POSITION) // 8
        self._my_closed = (segment.role.line + LINE_CLOSED) // 8
        self._peer_position = (other.line + LINE_POSITION) // 8
        self._peer_closed = (other.line + LINE_CLOSED) // 8
        flags = segment.header.flags
        self._digest = _digest_function() if flags & FLAG_CHECKSUM else None
        self._bell = Doorbell(segment.name) if flags & FLAG_DOORBELL else None
        self._freed = Waiter(segment.semaphores["freed"], wait, self._obstacle)
        self._items = Waiter(segment.semaphores["items"], wait, self._obstacle)
        self._joined = Waiter(segment.semaphores["joined"], "block", self._obstacle)
        self._post_freed = segment.semaphores["freed"].release
        self._post_items = segment.semaphores["items"].release
        self._attached = False
        self._watch: PeerWatch | None = None
        if not segment.created_here:
            self._meet_peer()

    @classmethod
    def create(
        cls,
        num_slots: int = DEFAULT_NUM_SLOTS,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        *,
        wait: WaitPolicy = "predict",
        checksum: bool = False,
        doorbell: bool = False,
    ) -> Self:
        """Creates a ring and takes this side of it; the peer attaches by `.name`.

        Args:
          num_slots: messages that can wait in the ring.
          slot_bytes: the largest message.
          wait: this side's wait policy, see ipc.waiting.
          checksum: protect every payload with XXH3-64 (needs the `checksum` extra on both sides).
            Descriptors always carry a CRC-32.
          doorbell: add a descriptor to wait on: asyncio, and many rings in one thread.

        Raises OutOfSharedMemory when /dev/shm has no room, ValueError for impossible sizes.
        """
        check_policy(wait)
        geometry = Geometry(num_slots, slot_bytes)
        if checksum:
            _digest_function()
        flags = (FLAG_CHECKSUM if checksum else 0) | (FLAG_DOORBELL if doorbell else 0)
        segment = Segment.create(cls._role, geometry, flags)
        try:
            return cls(segment, wait)
        except BaseException:
            unlink_names(segment.name)
            raise

    @classmethod
    def attach(cls, name: str, *, wait: WaitPolicy = "predict") -> Self:
        """Takes the free side of the ring `name`, and removes the names from /dev/shm.

        Raises RingNotFound, RoleTaken, PeerDied, CorruptSegment; see Segment.attach.
        """
        check_policy(wait)
        segment = Segment.attach(name, cls._role)
        side = cls(segment, wait)
        segment.complete()
        if side._bell is not None:
            side._bell.ring()  # a creator that sleeps on the descriptor learns whom to watch
        return side

    @property
    def name(self) -> str:
        """The name to attach to. It stops working once both sides have attached."""
        return self._segment.name

    @property
    def session(self) -> int:
        """64 random bits that no other ring has."""
        return self._session

    @property
    def capacity(self) -> int:
        """Messages that can wait in the ring."""
        return self._num_slots

    @property
    def slot_bytes(self) -> int:
        """The largest message, in bytes."""
        return self._slot_bytes

    def wait_attached(self, timeout: float | None = None) -> ProcessIdentity:
        """Waits until the other side has attached, and returns who it is.

        Raises RingTimeout, or PeerDied when a process named to `expect_peer` has ended.
        """
        self._begin()
        try:
            if not self._attached:
                if not self._joined.take(deadline_after(timeout)):
                    raise RingTimeout(
                        f"no {self._role.other} attached to {self.name} within {timeout} s"
                    )
                self._meet_peer()
            return self._segment.peer()
        finally:
            self._busy = False

    def expect_peer(self, pid: int) -> None:
        """Names the process that is going to attach, such as a child just started, so that its
        death before attaching is noticed too."""
        self._begin()
        try:
            if not self._attached:
                start_time = process_start_time(pid)
                namespace = self._segment.me.pid_namespace
                # A process that is gone already gets an identity that nothing alive has.
                identity = ProcessIdentity(pid, -1 if start_time is None else start_time, namespace)
                self._replace_watch(PeerWatch(identity))
        finally:
            self._busy = False

    def close(self) -> None:
        """Ends this side. Never waits; calling it again does nothing.

        In a process that inherited the object through fork, only the copies of the handles go.
        """
        if self._closed:
            return
        if getpid() == self._pid:
            self._begin()
            try:
                self._say_goodbye()
                unlink_names(self.name)
            finally:
                self._busy = False
        self._closed = True
        for slot in self._slots:
            slot.release()
        if self._watch is not None:
            self._watch.close()
        if self._bell is not None:
            self._bell.close()
        self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say_goodbye(self) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        """Enters the object; send() and receive() have this written out.

        No call may come between looking at _busy and setting it: another thread could run there.
        """
        if getpid() != self._pid or self._closed or self._busy:
            self._refuse()
        self._busy = True

    def _refuse(self) -> None:
        if getpid() != self._pid:
            raise ForeignProcess(
                f"this {self._role} belongs to process {self._pid}; a forked child must open a "
                "ring of its own"
            )
        if self._closed:
            raise RingClosed(f"this {self._role} was closed")
        raise RingInUse(
            f"this {self._role} serves one call at a time: another thread, or the code that a "
            "signal handler interrupted, is inside it"
        )

    def _obstacle(self) -> Exception | None:
        """Says why waiting for the peer is hopeless, or None."""
        if not self._attached and (self._joined.held or self._joined.grab()):
            self._meet_peer()
        if self._watch is None or self._watch.alive():
            return None
        return PeerDied(str(self._role.other), self._watch.identity.pid, self._last_crossed())

    def _last_crossed(self) -> int:
        raise NotImplementedError

    def _meet_peer(self) -> None:
        self._replace_watch(PeerWatch(self._segment.peer()))
        self._attached = True

    def _replace_watch(self, watch: PeerWatch) -> None:
        old, self._watch = self._watch, watch
        if old is not None:
            old.close()

    def _count(self, depth: int, waiter: Waiter) -> RingCounters:
        return RingCounters(
            messages=self._sequence,
            payload_bytes=self._payload_bytes,
            depth=depth,
            capacity=self.capacity,
            waits=waiter.waits,
            wait_ns=waiter.wait_ns,
        )


def _digest_function() -> Callable[[bytes | memoryview], int]:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        raise RingError(
            "payload checksums need xxhash: pip install 'jax-specdec[checksum]', or create the "
            "ring with checksum=False"
        ) from None
    return xxh3_64_intdigest
