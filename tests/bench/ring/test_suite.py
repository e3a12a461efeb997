"""The ring's benchmark: all contenders deliver equal data, one message at a time."""

import os

import pytest

from bench.ring import link as ring_link
from bench.ring import suite as bench


@pytest.mark.parametrize("name", ["ring, no checksum", "multiprocessing.Queue", "ZeroMQ msgpack"])
def test_contenders_deliver_equal_steps_and_are_measured(name):
    with ring_link.link(name, max(os.sched_getaffinity(0))) as link:
        ring_link.check_equal(link, [size for size, *_ in bench.CASES.values()])
        for gap in (1e-4, 0.0):
            seconds, share, latencies = ring_link.measure(link, 4160, gap, 20)
            assert seconds > 0
            assert len(latencies) == (20 if gap else 0)
            assert share >= 0
    assert not link.process.is_alive()
