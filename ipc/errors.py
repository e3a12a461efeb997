"""Every error of the ring, each derived from RingError."""


class RingError(Exception):
    """Base of every error that the ring raises on purpose."""


class RingTimeout(RingError, TimeoutError):
    """The caller's timeout passed first. The ring is unchanged."""


class RingFull(RingTimeout):
    """The sender found no free slot within its timeout; the message was not sent."""


class EndOfStream(RingError):
    """The producer closed its side, and every message before that was delivered."""


class Undelivered(RingError):
    """The producer closed the ring, and messages that it had sent will never be read.

    Attributes:
      messages: how many.
    """

    def __init__(self, what: str, messages: int) -> None:
        self.messages = messages
        super().__init__(what, messages)

    def __str__(self) -> str:
        return str(self.args[0])


class PeerClosed(RingError):
    """The consumer closed its side and will read nothing more."""


class PeerDied(RingError):
    """The other side is gone without closing the ring: its process ended, or dropped it.

    Attributes:
      side: "producer" or "consumer", the side that died.
      pid: its process id.
      dropped: its process lives, but lost the last reference to the ring without closing it.
      last_sequence: the last message known to have crossed the ring, -1 if none did. At the
        reader: the last one received. At the writer: the last one that the reader took.
    """

    def __init__(self, side: str, pid: int, last_sequence: int, dropped: bool = False) -> None:
        self.side = side
        self.pid = pid
        self.dropped = dropped
        self.last_sequence = last_sequence
        last = "no message crossed it"
        if last_sequence >= 0:
            last = f"message {last_sequence} was the last to cross it"
        super().__init__(
            f"the {side} (pid {pid}) {'dropped the ring' if dropped else 'ended'} without closing "
            f"{'it' if dropped else 'the ring'}; {last}. This session is over: create a new "
            f"ring for the restarted {side}"
        )

    def __reduce__(self) -> tuple[type["PeerDied"], tuple[str, int, int, bool]]:
        return type(self), (self.side, self.pid, self.last_sequence, self.dropped)


class MessageTooLarge(RingError, ValueError):
    """The message does not fit a slot. Nothing was sent.

    Attributes:
      size: bytes of the message.
      limit: bytes of a slot.
    """

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(
            f"a message of {size} bytes does not fit a slot of {limit} bytes: "
            f"create the ring with slot_bytes >= {size}"
        )

    def __reduce__(self) -> tuple[type["MessageTooLarge"], tuple[int, int]]:
        return type(self), (self.size, self.limit)


class CorruptMessage(RingError):
    """A slot holds bytes that this session's producer cannot have sent.

    The ring is unusable from here on: nothing after the damage can be trusted.
    """


class CorruptSegment(RingError):
    """The shared memory is not a ring of this version, or its header is damaged."""


class RingNotFound(RingError):
    """No ring has this name: it never existed, was closed, or has both its sides already."""


class RoleTaken(RingError):
    """The ring already has its one producer or its one consumer."""


class RingClosed(RingError, ValueError):
    """This side was closed."""


class RingInUse(RingError):
    """Another thread, or the code that a signal handler interrupted, is inside this object."""


class ForeignProcess(RingError):
    """The object was inherited through fork: only the process that opened it may use it."""


class OutOfSharedMemory(RingError, OSError):
    """There is no room for the ring in /dev/shm, or in the memory that the process may map."""
