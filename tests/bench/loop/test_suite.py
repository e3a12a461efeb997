"""The loop's benchmark: all contenders do equal work, and a wrong one is caught."""

import numpy as np
import pytest

from bench.loop import consumer, rig


@pytest.mark.fast
def test_the_workers_time_is_that_of_launching_and_of_publishing():
    span = {"ready": 9_000, "published": 18_000, "dispatch": 4_000}
    table = np.zeros((3, 5), np.int64)  # two steps as they ran, and this one
    table[2, consumer.PROCESSED] = 25_000
    found = rig._steps(1.0, np.zeros(2, np.int64), table, 0, [span])
    assert found["worker us"] == pytest.approx(13)
    assert found["host us"] == pytest.approx(16)
