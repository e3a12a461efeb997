"""Hostile bytes: whatever the segment holds, a side gets its messages or an error of the ring.

`.ci/heavy ring` damages many more segments.
"""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import RingReader, RingWriter, errors
from ipc.segment_layout import (
    DESCRIPTOR,
    DESCRIPTOR_FIELDS,
    DESCRIPTOR_MAGIC,
    PAGE_BYTES,
    SEGMENT_HEADER_BYTES,
    VERSION,
)
from tests.support.ring_damage import SLOT_BYTES, mutate, outcome, used_ranges


@pytest.mark.fast
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, DESCRIPTOR_MAGIC ^ 1),
        (1, VERSION + 1),
        (2, 2),
        (2, 5),
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


def test_mutated_messages_are_delivered_whole_or_refused():
    """CRC-32 guards the descriptors, the payload checksum the slots, by default."""
    seen = [outcome(seed, *range_, True) for range_ in used_ranges() for seed in range(60)]
    assert set(seen) == {"delivered", "CorruptMessage"}
    assert seen.count("CorruptMessage") > 72


def test_mutated_lines_never_disturb_the_messages():
    """No read depends on positions or identities: they are information only."""
    seen = [outcome(seed, SEGMENT_HEADER_BYTES, PAGE_BYTES, False) for seed in range(60)]
    assert set(seen) == {"delivered"}


def test_mutated_segment_headers_are_refused_by_the_attacher():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        with RingReader.create(3, SLOT_BYTES, wait="block") as reader:
            before = bytes(reader._buffer[:SEGMENT_HEADER_BYTES])
            mutate(reader._buffer, rng, 0, SEGMENT_HEADER_BYTES)
            if bytes(reader._buffer[:SEGMENT_HEADER_BYTES]) == before:
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
