"""Hostile bytes: whatever the segment holds, a side gets its messages or the ring's own error."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import errors
from ipc.peers import ProcessIdentity, current_process, is_alive
from ipc.ring import RingReader, RingWriter
from ipc.segment_layout import (
    CONSUMER_LINE,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    DESCRIPTOR_FIELDS,
    DESCRIPTOR_MAGIC,
    PAGE_BYTES,
    PRODUCER_LINE,
    SEGMENT_HEADER_BYTES,
    VERSION,
    Geometry,
    Role,
    SegmentHeader,
    pack_identity,
    unpack_identity,
)

SLOT_BYTES = 64
MESSAGES = [bytes([i]) * (10 * i) for i in range(3)]


@pytest.mark.fast
def test_layout():
    """Sizes and offsets are part of the format: changing one is a new version."""
    assert (SEGMENT_HEADER_BYTES, PRODUCER_LINE, CONSUMER_LINE, PAGE_BYTES) == (
        92,
        1024,
        2048,
        4096,
    )
    assert (DESCRIPTOR_FIELDS.size, DESCRIPTOR.size, DESCRIPTOR_BYTES, VERSION) == (52, 56, 64, 2)
    geometry = Geometry(16, 1 << 20)
    assert geometry.num_descriptors == 17
    assert [geometry.descriptor_offset(i) for i in (0, 16, 17)] == [4096, 4096 + 16 * 64, 4096]
    assert geometry.stride == 1 << 20
    assert [geometry.slot_offset(i) for i in (0, 15)] == [8192, 8192 + 15 * geometry.stride]
    assert geometry.total_bytes == 8192 + 16 * geometry.stride
    assert [Geometry(n, 1).slots_start for n in (63, 64)] == [8192, 12288]
    assert [Geometry(1, n).stride for n in (1, 4096, 4097)] == [4096, 4096, 8192]


@given(
    num_slots=st.integers(1, 65536),
    slot_bytes=st.integers(1, 1 << 34),
    role=st.sampled_from(Role),
    pid=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**64 - 1),
    session=st.integers(1, 2**64 - 1),
    flags=st.integers(0, 3),
)
def test_segment_header_round_trips(num_slots, slot_bytes, role, pid, start, session, flags):
    geometry = Geometry(num_slots, slot_bytes)
    header = SegmentHeader(geometry, role, ProcessIdentity(pid, start, start), session, flags)
    assert SegmentHeader.unpack(header.pack(), geometry.total_bytes) == header


def sealed(**changes: int) -> tuple[bytes, int]:
    """A segment header with changed fields and a right checksum, and the size it claims."""
    names = ["magic", "version", "role", "num_slots", "slot_bytes", "stride", "total", "session"]
    names += ["pid", "start", "space", "flags"]
    geometry = Geometry(3, SLOT_BYTES)
    header = SegmentHeader(geometry, Role.CONSUMER, current_process(), 7, 0)
    layout = struct.Struct("<8sIIQQQQQQQQQ")
    fields = dict(zip(names, layout.unpack(header.pack()[: layout.size]), strict=True)) | changes
    raw = layout.pack(*fields.values())
    return raw + struct.pack("<I", zlib.crc32(raw)), geometry.total_bytes


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"magic": b"NOTARING"}, "not a ring"),
        ({"version": 1}, "version 1; this code speaks 2"),
        ({"role": 0}, "role 0"),
        ({"role": 3}, "role 3"),
        ({"num_slots": 0}, "num_slots is 0"),
        ({"num_slots": 4}, "need"),
        ({"num_slots": 2**63}, "num_slots is"),
        ({"slot_bytes": 0}, "slot_bytes is 0"),
        ({"slot_bytes": 2**64 - 1}, "slot_bytes is"),
        ({"slot_bytes": 4097}, "need"),
        ({"stride": 0}, "need"),
        ({"total": 2**40}, "need"),
        ({"session": 0}, "session 0"),
        ({"flags": 4}, "flags 4"),
    ],
)
def test_a_well_sealed_but_impossible_header_is_refused(changes, what):
    raw, size = sealed()
    SegmentHeader.unpack(raw, size)
    raw, size = sealed(**changes)
    with pytest.raises(errors.CorruptSegment, match=what):
        SegmentHeader.unpack(raw, size)
    with pytest.raises(errors.CorruptSegment, match="the segment has"):
        SegmentHeader.unpack(sealed()[0], size - 1)
    with pytest.raises(errors.CorruptSegment, match="fewer than"):
        SegmentHeader.unpack(raw[:50], 50)


@given(raw=st.binary(min_size=SEGMENT_HEADER_BYTES, max_size=SEGMENT_HEADER_BYTES))
def test_random_headers_are_refused(raw):
    with pytest.raises(errors.CorruptSegment):
        SegmentHeader.unpack(raw, 20480)


def test_a_line_with_another_session_or_a_wrong_checksum_is_refused():
    me = current_process()
    line = pack_identity(me, 5)
    assert unpack_identity(line, 5, me.pid_namespace) == me
    for broken, session in ((line, 6), (line[:8] + b"\xff" + line[9:], 5), (bytes(28), 5)):
        with pytest.raises(errors.CorruptSegment, match="names the peer"):
            unpack_identity(broken, session, me.pid_namespace)


def test_a_recycled_or_impossible_pid_is_not_alive():
    me = current_process()
    assert is_alive(me)
    assert not is_alive(ProcessIdentity(me.pid, me.start_time + 1, me.pid_namespace))
    for pid in (0, 2**31, 2**64 - 1, 2**22 + 1):
        assert not is_alive(ProcessIdentity(pid, me.start_time, me.pid_namespace))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, DESCRIPTOR_MAGIC ^ 1),
        (1, VERSION + 1),
        (2, 2),
        (3, 0),
        (3, 2),
        (3, 2**64 - 1),
        (4, 1),
        (5, SLOT_BYTES + 1),
        (5, 2**64 - 1),
        (8, 3),
        (8, 2**32 - 1),
    ],
)
def test_a_well_sealed_but_wrong_descriptor_is_refused(field, value):
    """Even with a right CRC: magic, version, flags, sequence, session, size, slot are checked."""
    with RingReader.create(3, SLOT_BYTES) as reader, RingWriter.attach(reader.name) as writer:
        writer.send(b"zero")
        writer.send(b"one")
        assert reader.receive(1).data == b"zero"
        offset = reader._offsets[1]
        fields = list(DESCRIPTOR_FIELDS.unpack_from(reader._buffer, offset))
        fields[field] = value
        raw = DESCRIPTOR_FIELDS.pack(*fields)
        DESCRIPTOR.pack_into(reader._buffer, offset, raw, zlib.crc32(raw))
        for _ in range(2):  # and it stays refused
            with pytest.raises(errors.CorruptMessage, match="message 1 is damaged"):
                reader.receive(1)
            with pytest.raises(errors.CorruptMessage):
                reader.try_receive()


def mutate(memory: memoryview, rng: np.random.Generator, low: int, high: int) -> None:
    array = np.frombuffer(memory, np.uint8)[low:high]
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, array.size))
        kind = rng.integers(0, 3)
        if kind == 0:
            array[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            array[at : at + 8] = rng.choice([0, 255, 127, 128])
        else:
            other = int(rng.integers(0, array.size))
            count = min(int(rng.integers(1, 64)), array.size - max(at, other))
            array[at : at + count] = array[other : other + count].copy()


def used_ranges() -> list[tuple[int, int]]:
    """All that follows the lines, and the bytes that a ring of `outcome` uses: aim there too."""
    geometry = Geometry(3, SLOT_BYTES)
    descriptors = PAGE_BYTES, geometry.descriptor_offset(3) + DESCRIPTOR_BYTES
    slots = [geometry.slot_offset(i) for i in range(3)]
    return [
        (PAGE_BYTES, geometry.total_bytes),
        descriptors,
        *((slot, slot + SLOT_BYTES) for slot in slots),
    ]


def outcome(seed: int, low: int, high: int, checksum: bool) -> str:
    """Damages a live segment and reads: "delivered" (all equal) or the name of the ring's error."""
    rng = np.random.default_rng(seed)
    with (
        RingReader.create(3, SLOT_BYTES, wait="block", checksum=checksum) as reader,
        RingWriter.attach(reader.name, wait="block") as writer,
    ):
        for message in MESSAGES:
            writer.send(message)
        writer.close()
        mutate(reader._buffer, rng, low, high)
        try:
            received = [message.data for message in reader]
        except errors.RingError as error:
            return type(error).__name__
        assert len(received) == len(MESSAGES)
        if checksum or high <= PAGE_BYTES:
            assert received == MESSAGES
        return "delivered"


def test_mutated_messages_are_delivered_whole_or_refused():
    """Mutations in descriptors and slots; a payload checksum guards what CRC-32 does not."""
    seen = [outcome(seed, *range_, True) for range_ in used_ranges() for seed in range(250)]
    assert set(seen) == {"delivered", "CorruptMessage"}
    assert seen.count("CorruptMessage") > 300


def test_mutated_lines_never_disturb_the_messages():
    """Positions and identities are information, never what a read depends on."""
    seen = [outcome(seed, SEGMENT_HEADER_BYTES, PAGE_BYTES, False) for seed in range(200)]
    assert set(seen) == {"delivered"}


def test_mutated_segment_headers_are_refused_by_the_attacher():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        with RingReader.create(3, SLOT_BYTES, wait="block") as reader:
            before = bytes(reader._buffer[:SEGMENT_HEADER_BYTES])
            mutate(reader._buffer, rng, 0, SEGMENT_HEADER_BYTES)
            if bytes(reader._buffer[:SEGMENT_HEADER_BYTES]) == before:
                continue
            with pytest.raises(errors.CorruptSegment):
                RingWriter.attach(reader.name)


@settings(max_examples=200)
@given(position=st.integers(0, 2**64 - 1))
def test_a_lying_consumer_position_is_bounded(position):
    with RingReader.create(3, SLOT_BYTES) as reader, RingWriter.attach(reader.name) as writer:
        writer.send(b"x")
        reader._words[reader._my_position] = position
        assert 0 <= writer.counters().depth <= 1
