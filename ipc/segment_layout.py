"""The bytes of a ring's segment: sizes, offsets, and how headers are packed and checked.

    offset      size   content
    0           128    segment header: written once by the creator, checked by the attacher
    1024        128    producer line: who the producer is, whether it closed before anybody attached
    2048        128    consumer line: who the consumer is, its position, whether it closed
    4096        64     descriptor of messages 0, N + 1, 2(N + 1), ...       N = num_slots
    4160        64     descriptor of messages 1, N + 2, ...
    ...                N + 1 in all: one is always free for the end of the stream
    slots_start stride slot 0: up to slot_bytes of one message's payload
    ...                N slots; a descriptor names the slot of its message

slots_start and stride are multiples of the page size.

All integers are little-endian. 64-bit counts, positions, sessions and times belong here, because
the messages themselves are 32-bit words. Nothing in this module touches shared memory: it unpacks
headers from private copies, so that a check and the later use see the same value.
"""

import struct
import sys
import zlib
from dataclasses import astuple, dataclass
from enum import IntEnum

from ipc.errors import CorruptSegment
from ipc.peers import ProcessIdentity

_MAGIC = b"JSDRING\x01"
DESCRIPTOR_MAGIC = 0x47534D52  # "RMSG"
LAYOUT_VERSION = 5

PAGE_BYTES = 4096
PRODUCER_LINE = 1024
CONSUMER_LINE = 2048
DESCRIPTOR_BYTES = 64  # a cache line

MAX_SLOTS = 1 << 16
MAX_SLOT_BYTES = 1 << 34

FLAG_CHECKSUM = 1  # segment: every payload carries an XXH3-64, which both sides compute
FLAG_DOORBELL = 2  # segment: the producer rings a FIFO after every message
SEGMENT_FLAGS = FLAG_CHECKSUM | FLAG_DOORBELL

FLAG_END = 1  # descriptor: end of stream, no payload
FLAG_DROPPED = 2  # descriptor, beside FLAG_END: nobody closed the ring, so more was to come

# magic, version, creator's role, num_slots, slot_bytes, stride, total bytes, session,
# creator's pid, start time, pid namespace, time namespace, flags
_SEGMENT = struct.Struct("<8sIIQQQQQQQQQQ")
_CRC = struct.Struct("<I")
SEGMENT_HEADER_BYTES = _SEGMENT.size + _CRC.size

# pid, start time, session
_IDENTITY = struct.Struct("<QQQ")
IDENTITY_BYTES = _IDENTITY.size + _CRC.size
# Offsets of words within a line, which only their owner writes; in a cache line of their own.
LINE_POSITION = 64
LINE_CLOSED = 72

# magic, version, flags, sequence, session, byte count, send time (CLOCK_MONOTONIC ns), checksum,
# slot
DESCRIPTOR_FIELDS = struct.Struct("<IHHQQQQQI")
# the fields above as bytes, and their CRC-32
DESCRIPTOR = struct.Struct(f"<{DESCRIPTOR_FIELDS.size}sI")

assert sys.byteorder == "little", "the ring's counters are read in native byte order"
assert SEGMENT_HEADER_BYTES == 100 <= PRODUCER_LINE
assert IDENTITY_BYTES == 28 <= LINE_POSITION
assert PRODUCER_LINE + 128 <= CONSUMER_LINE
assert CONSUMER_LINE + 128 <= PAGE_BYTES
assert DESCRIPTOR_FIELDS.size == 52
assert DESCRIPTOR.size == 56 <= DESCRIPTOR_BYTES


class Role(IntEnum):
    """A side of the ring."""

    PRODUCER = 1
    CONSUMER = 2

    @property
    def other(self) -> "Role":
        """The opposite side."""
        return Role(3 - self)

    @property
    def line(self) -> int:
        """Offset of this side's line in the segment."""
        return PRODUCER_LINE if self is Role.PRODUCER else CONSUMER_LINE

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Geometry:
    """How many messages a ring holds, and how large each may be.

    Attributes:
      num_slots: messages that can wait in the ring, 1..65536.
      slot_bytes: the largest payload, 1..2**34 bytes.

    Raises ValueError when either is out of range, TypeError when it is no whole number.
    """

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("num_slots", self.num_slots, MAX_SLOTS),
            ("slot_bytes", self.slot_bytes, MAX_SLOT_BYTES),
        ):
            if not hasattr(value, "__index__"):
                raise TypeError(f"{name} is {value!r}, but must be a whole number, 1 to {limit}")
            if not 1 <= value <= limit:
                raise ValueError(f"{name} is {value}, but must be from 1 to {limit}")

    @property
    def num_descriptors(self) -> int:
        """One more than num_slots: the end of stream always finds a free one."""
        return self.num_slots + 1

    @property
    def slots_start(self) -> int:
        """Offset of slot 0."""
        return PAGE_BYTES + _pages(self.num_descriptors * DESCRIPTOR_BYTES)

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return _pages(self.slot_bytes)

    @property
    def total_bytes(self) -> int:
        """Size of the whole segment."""
        return self.slots_start + self.num_slots * self.stride

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes in a segment's header."""
        return self.num_slots, self.slot_bytes, self.stride, self.total_bytes

    def descriptor_offset(self, sequence: int) -> int:
        """Offset of the descriptor of message number `sequence`."""
        return PAGE_BYTES + sequence % self.num_descriptors * DESCRIPTOR_BYTES

    def slot_offset(self, slot: int) -> int:
        """Offset of the payload in slot number `slot`."""
        return self.slots_start + slot * self.stride


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first bytes of a segment, which never change."""

    geometry: Geometry
    creator_role: Role
    creator: ProcessIdentity
    session: int  # 64 random bits, never 0
    flags: int

    def pack(self) -> bytes:
        """Returns SEGMENT_HEADER_BYTES bytes, CRC-32 last."""
        numbers = *self.geometry.sizes, self.session, *astuple(self.creator), self.flags
        fields = _SEGMENT.pack(_MAGIC, LAYOUT_VERSION, self.creator_role, *numbers)
        return fields + _CRC.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, raw: bytes, file_bytes: int) -> "SegmentHeader":
        """Checks every field of a private copy of the header.

        Args:
          raw: the first bytes of the segment.
          file_bytes: the segment's real size.

        Raises CorruptSegment, naming what is wrong.
        """
        if len(raw) < SEGMENT_HEADER_BYTES:
            raise CorruptSegment(
                f"the segment has {file_bytes} bytes, fewer than the {SEGMENT_HEADER_BYTES} of a "
                "ring's header: it is not a ring, or its creator has not finished"
            )
        magic, version, role, *numbers, flags = _SEGMENT.unpack_from(raw)
        if magic != _MAGIC:
            raise CorruptSegment(f"the segment starts with {magic!r}, not {_MAGIC!r}: not a ring")
        if version != LAYOUT_VERSION:
            raise CorruptSegment(
                f"the ring has version {version}; this code speaks {LAYOUT_VERSION}"
            )
        if _CRC.unpack_from(raw, _SEGMENT.size) != (zlib.crc32(raw[: _SEGMENT.size]),):
            raise CorruptSegment("the segment header's checksum is wrong: the memory is damaged")
        sizes, session, creator = numbers[:4], numbers[4], ProcessIdentity(*numbers[5:])
        geometry = _checked_geometry(sizes, file_bytes)
        if role not in (Role.PRODUCER, Role.CONSUMER) or session == 0 or flags & ~SEGMENT_FLAGS:
            raise CorruptSegment(
                f"the segment header is impossible: role {role}, session {session}, flags {flags}"
            )
        return cls(geometry, Role(role), creator, session, flags)


def _checked_geometry(sizes: list[int], file_bytes: int) -> Geometry:
    try:
        geometry = Geometry(*sizes[:2])
    except ValueError as error:
        raise CorruptSegment(f"the segment header is impossible: {error}") from None
    if tuple(sizes) != geometry.sizes or geometry.total_bytes != file_bytes:
        raise CorruptSegment(
            f"num_slots={sizes[0]} and slot_bytes={sizes[1]} need a stride and bytes in all of "
            f"{geometry.sizes[2:]}; the header says {sizes[2:]}, the segment has {file_bytes}"
        )
    return geometry


def _pages(count: int) -> int:
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def pack_identity(identity: ProcessIdentity, session: int) -> bytes:
    """Returns the first IDENTITY_BYTES bytes of a side's line."""
    fields = _IDENTITY.pack(identity.pid, identity.start_time, session)
    return fields + _CRC.pack(zlib.crc32(fields))


def unpack_identity(raw: bytes, session: int, reader: ProcessIdentity) -> ProcessIdentity:
    """Reads who a side is from a private copy of its line, which has no namespaces.

    Args:
      raw: the line's first IDENTITY_BYTES bytes.
      session: of the ring.
      reader: the calling process; both sides of a ring share namespaces.

    Raises CorruptSegment.
    """
    fields = raw[: _IDENTITY.size]
    pid, start_time, line_session = _IDENTITY.unpack(fields)
    (crc,) = _CRC.unpack_from(raw, _IDENTITY.size)
    if crc != zlib.crc32(fields) or line_session != session:
        raise CorruptSegment("the line that names the peer is damaged")
    return ProcessIdentity(pid, start_time, reader.pid_namespace, reader.time_namespace)
