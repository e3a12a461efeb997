"""Hostile bytes: whatever the segment holds, a side gets its messages or an error of the ring."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import RingError, RingReader, RingWriter, errors
from ipc import segment_layout as layout
from ipc.segment_layout import PAGE_BYTES, SEGMENT_HEADER_BYTES
from tests.support.ring_checks import memory_of

SLOT_BYTES = 64
MESSAGES = [bytes([i]) * (10 * i) for i in range(3)]


def mutate(memory: memoryview, rng: np.random.Generator, low: int, high: int) -> None:
    """Changes one to four places of memory[low:high]: bits, runs of one byte, copied ranges."""
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
    """Returns the range behind the lines, then the parts of it that a ring of `outcome` uses."""
    geometry = layout.Geometry(3, SLOT_BYTES)
    descriptors = PAGE_BYTES, geometry.descriptor_offset(3) + layout.DESCRIPTOR_BYTES
    slots = [geometry.slot_offset(i) for i in range(3)]
    parts = [descriptors, *((slot, slot + SLOT_BYTES) for slot in slots)]
    return [(PAGE_BYTES, geometry.total_bytes), *parts]


def outcome(seed: int, low: int, high: int, **options: bool) -> str:
    """Damages a live segment and reads: "delivered", "damaged" or the name of the ring's error."""
    rng = np.random.default_rng(seed)
    with (
        RingReader.create(3, SLOT_BYTES, wait="block", **options) as reader,
        RingWriter.attach(reader.name, wait="block") as writer,
    ):
        for message in MESSAGES:
            writer.send(message)
        writer.close()
        mutate(memory_of(reader), rng, low, high)
        try:
            received = [message.data for message in reader]
        except RingError as error:
            return type(error).__name__
        assert len(received) == len(MESSAGES)
        return "delivered" if received == MESSAGES else "damaged"


@pytest.mark.parametrize(("field", "value"), [
    (0, layout.DESCRIPTOR_MAGIC ^ 1), (1, layout.LAYOUT_VERSION + 1),
    *((2, flags) for flags in (2, 5)), *((3, sequence) for sequence in (0, 2, 2**64 - 1)),
    (4, 1), *((5, size) for size in (SLOT_BYTES + 1, 2**64 - 1)),
    *((8, slot) for slot in (3, 2**32 - 1)),
])  # fmt: skip
def test_a_well_sealed_but_wrong_descriptor_is_refused(pair, field, value):
    """Even with a right CRC: magic, version, flags, sequence, session, size, slot are checked."""
    reader, writer = pair(3, SLOT_BYTES)
    writer.send(b"zero")
    writer.send(b"one")
    assert reader.receive(1).data == b"zero"
    offset = reader._offsets[1]
    fields = list(layout.DESCRIPTOR_FIELDS.unpack_from(memory_of(reader), offset))
    fields[field] = value
    raw = layout.DESCRIPTOR_FIELDS.pack(*fields)
    layout.DESCRIPTOR.pack_into(memory_of(reader), offset, raw, zlib.crc32(raw))
    for _ in range(2):  # and it stays refused
        for call in (lambda: reader.receive(1), reader.try_receive):
            with pytest.raises(errors.CorruptMessage, match="message 1 is damaged"):
                call()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", [60, pytest.param(40_000, marks=pytest.mark.slow)])
def test_mutated_messages_are_delivered_whole_or_refused(seeds):
    """CRC-32 guards the descriptors, the payload checksum the slots, by default."""
    seen = [outcome(seed, *range_) for range_ in used_ranges() for seed in range(seeds)]
    assert set(seen) == {"delivered", "CorruptMessage"}
    assert seen.count("CorruptMessage") > 1.2 * seeds
    # Negative control: with checksums switched off, damage arrives as if it were right.
    assert "damaged" in {outcome(seed, *used_ranges()[2], checksum=False) for seed in range(60)}


def test_mutated_lines_never_disturb_the_messages():
    """No read depends on positions or identities: they are information only."""
    lines = SEGMENT_HEADER_BYTES, PAGE_BYTES
    assert {outcome(seed, *lines, checksum=False) for seed in range(60)} == {"delivered"}


def test_mutated_segment_headers_are_refused_by_the_attacher():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        with RingReader.create(3, SLOT_BYTES, wait="block") as reader:
            before = bytes(memory_of(reader)[:SEGMENT_HEADER_BYTES])
            mutate(memory_of(reader), rng, 0, SEGMENT_HEADER_BYTES)
            if bytes(memory_of(reader)[:SEGMENT_HEADER_BYTES]) == before:
                continue
            with pytest.raises(errors.CorruptSegment):
                RingWriter.attach(reader.name)


@settings(max_examples=100)
@given(position=st.integers(0, 2**64 - 1))
def test_a_lying_consumer_position_is_bounded(position):
    with RingReader.create(3, SLOT_BYTES) as reader, RingWriter.attach(reader.name) as writer:
        writer.send(b"x")
        reader._words[reader._my_position] = position
        assert 0 <= writer.counters().depth <= 1
