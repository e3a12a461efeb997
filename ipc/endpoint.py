"""An end of a ring, of either side: creating, attaching, watching the peer, closing."""

import atexit
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from os import getpid, sched_getaffinity
from typing import ClassVar, Self

from ipc import segment_layout as layout
from ipc.counters import RingCounters
from ipc.doorbell import Doorbell
from ipc.errors import ForeignProcess, PeerDied, RingClosed, RingInUse, RingTimeout
from ipc.os_errors import explained
from ipc.peers import PeerWatch, ProcessIdentity, process_start_time
from ipc.segment import Segment
from ipc.segment_names import remove_names, unlink_names
from ipc.waiting import Waiter, WaitPolicy, check_policy, deadline_after

DEFAULT_NUM_SLOTS = 16
DEFAULT_SLOT_BYTES = 1 << 20


class Endpoint:
    """The common part of RingReader and RingWriter; not for direct use.

    Attributes:
      name: the name to attach to. It stops working once both sides have attached.
      session: 64 random bits, different for every ring.
      capacity: messages that can wait in the ring.
      slot_bytes: the largest message, in bytes.
    """

    _role: ClassVar[layout.Role]
    _closed = True  # until its parts are there
    _at_exit: Callable[[], None] | None = None
    _bell: Doorbell | None = None
    _watch: PeerWatch | None = None

    def __init__(self, segment: Segment, wait: WaitPolicy) -> None:
        self._segment = segment
        self.name = segment.name
        self._pid = segment.me.pid
        self._busy = False
        self._sequence = 0
        self._payload_bytes = 0
        self._find_places(segment)
        try:
            self._open(segment, wait)
        except BaseException:
            self._release()
            raise
        self._closed = False

    def _open(self, segment: Segment, wait: WaitPolicy) -> None:
        """Opens what may be refused, then meets the peer if it is there."""
        flags, semaphores = segment.header.flags, segment.semaphores
        self._bell = Doorbell(segment.name) if flags & layout.FLAG_DOORBELL else None
        self._freed = Waiter(semaphores["freed"], wait, self._obstacle, self._peer_shares)
        self._items = Waiter(semaphores["items"], wait, self._obstacle, self._peer_shares)
        self._joined = Waiter(semaphores["joined"], "block", self._obstacle)
        self._post_freed = semaphores["freed"].release
        self._post_items = semaphores["items"].release
        self._attached = False
        if not segment.created_here:
            self._meet_peer()

    def _find_places(self, segment: Segment) -> None:
        """Looks up once what send() and receive() need of the segment."""
        geometry = segment.header.geometry
        role, other = segment.role, segment.role.other
        self.session = segment.header.session
        self.capacity = geometry.num_slots
        self.slot_bytes = geometry.slot_bytes
        self._has_checksum = bool(segment.header.flags & layout.FLAG_CHECKSUM)
        self._num_descriptors = geometry.num_descriptors
        self._buffer = segment.buffer
        self._words = segment.words
        self._offsets = [geometry.descriptor_offset(i) for i in range(geometry.num_descriptors)]
        self._slots = [
            segment.buffer[geometry.slot_offset(i) :][: geometry.slot_bytes]
            for i in range(geometry.num_slots)
        ]
        self._my_position = (role.line + layout.LINE_POSITION) // 8
        self._my_closed = (role.line + layout.LINE_CLOSED) // 8
        self._peer_position = (other.line + layout.LINE_POSITION) // 8
        self._peer_closed = (other.line + layout.LINE_CLOSED) // 8

    @classmethod
    def create(
        cls,
        num_slots: int = DEFAULT_NUM_SLOTS,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        *,
        wait: WaitPolicy = "predict",
        checksum: bool = True,
        doorbell: bool = False,
    ) -> Self:
        """Creates a ring and takes this side of it; the peer attaches by `.name`.

        Args:
          num_slots: messages that can wait in the ring, 1 to 65536.
          slot_bytes: the largest message in bytes, 1 to 2**34.
          wait: how this side waits: "predict" sleeps until shortly before the next message is
            expected and then spins, as long as other programs leave it the core; "spin" looks all
            the time, "block" sleeps in the kernel.
          checksum: protect payloads with XXH3-64, whatever their size; both sides pay for it
            (docs/ring.md says how much). Descriptors always carry a CRC-32.
          doorbell: add a file descriptor, for asyncio and for many rings in one thread.

        Raises:
          OutOfSharedMemory: /dev/shm has no room, or the process may not map so much.
          ValueError: a size is out of range, or `checksum` is neither True nor False.
          RingError: the operating system refuses: no descriptor is left, this user cannot make
            files in /dev/shm. `__cause__` is the system's own error.
        """
        check_policy(wait)
        geometry = layout.Geometry(num_slots, slot_bytes)
        if checksum not in (True, False):  # None was the default, and must not switch it off
            raise ValueError(f"checksum is {checksum!r}, but must be True or False")
        flags = layout.FLAG_CHECKSUM * checksum | (layout.FLAG_DOORBELL if doorbell else 0)
        segment = Segment.create(cls._role, geometry, flags)
        try:
            endpoint = cls(segment, wait)
        except BaseException:
            segment.close()
            remove_names(segment.name)
            raise
        # Of a process that ends without close(), nothing but the names is left.
        endpoint._at_exit = partial(_remove_at_exit, segment.name, segment.me.pid)
        atexit.register(endpoint._at_exit)
        return endpoint

    @classmethod
    def attach(cls, name: str, *, wait: WaitPolicy = "predict") -> Self:
        """Takes the free side of the ring `name`, and removes the names from /dev/shm.

        Args:
          name: the creator's `.name`.
          wait: how this side waits, as in `create`.

        Raises:
          RingNotFound: no such ring (any more).
          PeerDied: the creator has ended. A reader first gets what that had committed.
          RoleTaken: this side is the creator's, or another process took it.
          CorruptSegment: the memory is not a ring of this version.
          RingError: the ring is of another pid or time namespace, or the operating system refuses;
            then the seat is free again.
        """
        check_policy(wait)
        segment = Segment.attach(name, cls._role)
        try:
            endpoint = cls(segment, wait)
        except BaseException:
            segment.leave_seat()
            segment.close()
            raise
        segment.complete()
        if endpoint._bell is not None:
            endpoint._bell.ring()  # wakes a creator that must now watch this process
        return endpoint

    def wait_attached(self, timeout: float | None = None) -> ProcessIdentity:
        """Waits until the other side has attached, and returns who it is.

        Args:
          timeout: seconds to wait; None waits without a limit.

        Raises:
          RingTimeout: the other side did not attach in time.
          PeerDied: the process named to `expect_peer` has ended.
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
        """Names the process that will attach, so that its death before that is noticed too.

        Args:
          pid: its process id, such as that of a child just started.
        """
        self._begin()
        try:
            if not self._attached:
                with explained("watch the process that will attach"):
                    start_time = process_start_time(pid)
                # If that process is gone already: an identity that no live process has.
                start_time = -1 if start_time is None else start_time
                identity = replace(self._segment.me, pid=pid, start_time=start_time)
                self._replace_watch(PeerWatch(identity))
        finally:
            self._busy = False

    def close(self) -> None:
        """Ends this side. Never waits; calling it again does nothing.

        In a forked child this closes the child's copies of the handles and nothing else.
        """
        self._close()

    def _close(self) -> None:
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
        self._release()
        self._segment.close()

    def _release(self) -> None:
        """Lets go of everything but the segment's own handles."""
        for slot in self._slots:
            slot.release()
        if self._watch is not None:
            self._watch.close()
        if self._bell is not None:
            self._bell.close()
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)

    def __del__(self) -> None:
        # At the end of the interpreter, the peer must see a death and no orderly end.
        if self._closed or sys.is_finalizing():
            return
        if getpid() != self._pid:
            self._close()
            return
        self._busy = False  # no call is inside it any more
        self._say_dropped()
        self._close()
        # Last, as the program may have made warnings errors.
        text = f"{type(self).__name__} {self.name} was dropped without close()"
        warnings.warn(text + self._dropped_what(), ResourceWarning, stacklevel=2, source=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close()

    def _say_goodbye(self) -> None:
        raise NotImplementedError

    def _say_dropped(self) -> None:
        """Tells the peer what it must know of a ring that nobody holds any more."""

    def _dropped_what(self) -> str:
        """Returns what else the warning of a dropped ring says."""
        return ""

    def _begin(self) -> None:
        """Marks this object as busy; send() and receive() have this code written out.

        No call may come between looking at _busy and setting it: another thread could run there.
        """
        if getpid() != self._pid or self._closed or self._busy:
            self._refuse()
        self._busy = True

    def _refuse(self) -> None:
        if getpid() != self._pid:
            raise ForeignProcess(
                f"this {self._role} belongs to process {self._pid}; create another ring for this "
                "forked child"
            )
        if self._closed:
            raise RingClosed(f"this {self._role} was closed; create a new ring to go on")
        raise RingInUse(
            f"this {self._role} serves one call at a time: another thread, or the code that a "
            "signal handler interrupted, is inside it"
        )

    def _obstacle(self) -> Exception | None:
        """Returns why waiting for the peer is hopeless, or None."""
        if not self._attached and (self._joined.held or self._joined.grab()):
            self._meet_peer()
        if self._watch is None or self._watch.alive():
            return None
        return PeerDied(str(self._role.other), self._watch.identity.pid, self._last_crossed())

    def _peer_shares(self, cores: set[int]) -> bool:
        """Says whether the peer can run on none but these cores, as far as that is known."""
        if self._watch is None:
            return True
        try:
            return sched_getaffinity(self._watch.identity.pid) <= cores
        except (OSError, OverflowError):  # it has ended; or a pid from damaged memory
            return True

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


def _remove_at_exit(name: str, pid: int) -> None:
    if getpid() == pid:  # a forked child inherits this
        remove_names(name)
