"""What several ring tests check of a ring or of what it left behind."""

import os

from ipc import RingWriter
from ipc.segment_names import PREFIX


def leftovers() -> list[str]:
    """Returns the names that this process left in /dev/shm."""
    return [
        name for name in os.listdir("/dev/shm") if PREFIX in name and f".{os.getpid()}." in name
    ]


def assert_slots_are_accounted_for(writer: RingWriter) -> None:
    """Asserts that each slot is on the stack of free ones or holds one message in flight."""
    messages = writer._sequence - (1 if writer._ended else 0)
    in_flight = range(writer._num_freed, messages)
    free = writer._free_slots[: writer.capacity - len(in_flight)]
    held = [writer._slot_of[number % writer._num_descriptors] for number in in_flight]
    assert sorted(free + held) == list(range(writer.capacity))
