"""Damage to a live ring's memory, and what the reader makes of it."""

import numpy as np

from ipc import RingError, RingReader, RingWriter
from ipc.segment_layout import DESCRIPTOR_BYTES, PAGE_BYTES, Geometry

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
        except RingError as error:
            return type(error).__name__
        assert len(received) == len(MESSAGES)
        if checksum or high <= PAGE_BYTES:
            assert received == MESSAGES
        return "delivered"
