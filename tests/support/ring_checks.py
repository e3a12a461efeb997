"""What several ring tests check of a ring or of what it left behind."""

import os

from ipc import RingReader, RingWriter
from ipc.segment_names import PREFIX


def leftovers() -> list[str]:
    """Returns the names that this process left in /dev/shm."""
    return [
        name for name in os.listdir("/dev/shm") if PREFIX in name and f".{os.getpid()}." in name
    ]


def memory_of(reader: RingReader) -> memoryview:
    """Returns the ring's shared memory, to be spoiled."""
    return reader._buffer


def slot_of(writer: RingWriter, number: int) -> int:
    """Returns the slot that message `number` was written to."""
    return writer._slot_of[number % writer._num_descriptors]


def assert_slots_are_accounted_for(writer: RingWriter) -> None:
    """Asserts that each slot is on the stack of free ones or holds one message in flight."""
    messages = writer._sequence - (1 if writer._ended else 0)
    in_flight = range(writer._num_freed, messages)
    free = writer._free_slots[: writer.capacity - len(in_flight)]
    held = [slot_of(writer, number) for number in in_flight]
    assert sorted(free + held) == list(range(writer.capacity))
