"""The loop's benchmark: all contenders do equal work, and a wrong one is caught."""

import numpy as np
import pytest

from bench.loop import consumer, rig


@pytest.mark.fast
def test_the_parts_of_the_host_time_add_up_to_it():
    """Sending goes on after the consumer has the bytes: that time is counted once."""
    span = {"ready": 9_000, "sent": 11_000, "published": 18_000, "dispatch": 4_000}
    table = np.zeros((3, 8), np.int64)  # two steps as they ran, and this one
    table[2, [consumer.RECEIVED, consumer.DECODED, consumer.PROCESSED]] = 15_000, 19_000, 25_000
    found = rig._steps(1.0, np.zeros(2, np.int64), table, 0, [span])
    parts = [found[f"part: {part} us"] for part in ("copy", "ring", "decode", "process")]
    assert parts == pytest.approx([2, 4, 4, 6])
    assert sum(parts) == pytest.approx(found["host us"])
    assert found["worker us"] == pytest.approx(13)  # launching the message, and publishing it
