"""The bytes of a segment: sizes and offsets as stated, damaged headers and lines refused."""

import struct
import zlib

import pytest

from ipc import errors, segment_layout
from ipc.peers import current_process
from ipc.segment_layout import Geometry, Role, SegmentHeader, pack_identity, unpack_identity

SLOT_BYTES = 64


def test_layout():
    """Sizes and offsets are part of the format: changing one is a new version."""
    names = "SEGMENT_HEADER_BYTES PRODUCER_LINE CONSUMER_LINE PAGE_BYTES DESCRIPTOR_BYTES"
    sizes = [getattr(segment_layout, name) for name in (*names.split(), "LAYOUT_VERSION")]
    assert sizes == [100, 1024, 2048, 4096, 64, 5]
    assert segment_layout.DESCRIPTOR_FIELDS.size + 4 == segment_layout.DESCRIPTOR.size == 56
    geometry = Geometry(16, 1 << 20)
    assert geometry.num_descriptors == 17
    assert [geometry.descriptor_offset(i) for i in (0, 16, 17)] == [4096, 4096 + 16 * 64, 4096]
    assert geometry.stride == 1 << 20
    assert [geometry.slot_offset(i) for i in (0, 15)] == [8192, 8192 + 15 * geometry.stride]
    assert geometry.total_bytes == 8192 + 16 * geometry.stride
    assert [Geometry(n, 1).slots_start for n in (63, 64)] == [8192, 12288]
    assert [Geometry(1, n).stride for n in (1, 4096, 4097)] == [4096, 4096, 8192]


def sealed(**changes: int) -> tuple[bytes, int]:
    """A segment header with changed fields and a right checksum, and the size it claims."""
    names = ["magic", "version", "role", "num_slots", "slot_bytes", "stride", "total", "session"]
    names += ["pid", "start", "pids", "times", "flags"]
    geometry = Geometry(3, SLOT_BYTES)
    header = SegmentHeader(geometry, Role.CONSUMER, current_process(), 7, 0)
    layout = struct.Struct("<8sIIQQQQQQQQQQ")
    fields = dict(zip(names, layout.unpack(header.pack()[: layout.size]), strict=True)) | changes
    raw = layout.pack(*fields.values())
    return raw + struct.pack("<I", zlib.crc32(raw)), geometry.total_bytes


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"magic": b"NOTARING"}, "not a ring"),
        ({"version": 1}, "version 1; this code speaks 5"),
        *(({name: value}, f"{name} {value}") for name, value in
          (("role", 0), ("role", 3), ("session", 0), ("flags", 4))),
        *(({name: value}, f"{name} is {value}") for name, value in
          (("num_slots", 0), ("num_slots", 2**63), ("slot_bytes", 0), ("slot_bytes", 2**64 - 1))),
        *(({name: value}, "need") for name, value in
          (("num_slots", 4), ("slot_bytes", 4097), ("stride", 0), ("total", 2**40))),
    ],
)  # fmt: skip
def test_a_well_sealed_but_impossible_header_is_refused(changes, what):
    raw, size = sealed()
    SegmentHeader.unpack(raw, size)
    for wrong, file_bytes, said in (
        (sealed(**changes)[0], size, what),
        (raw, size - 1, "the segment has"),
        (raw[:50], 50, "fewer than"),
    ):
        with pytest.raises(errors.CorruptSegment, match=said):
            SegmentHeader.unpack(wrong, file_bytes)


def test_lines_of_other_sessions_or_checksums_are_refused():
    me = current_process()
    line = pack_identity(me, 5)
    assert unpack_identity(line, 5, me) == me
    other = line[:8] + bytes([line[8] ^ 255]) + line[9:]
    for broken, session in ((line, 6), (other, 5), (bytes(28), 5)):
        with pytest.raises(errors.CorruptSegment, match="names the peer"):
            unpack_identity(broken, session, me)
