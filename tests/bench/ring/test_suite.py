"""The ring's benchmark: all contenders deliver equal data, one message at a time."""

import os
import signal
import threading
import time

import pytest

from bench.ring import link as ring_link
from bench.ring import suite as bench
from bench.timing import BenchError

CORE = max(os.sched_getaffinity(0))
SIZES = [size for size, *_ in bench.CASES.values()]


@pytest.mark.parametrize("name", ["ring, no checksum", "multiprocessing.Queue", "ZeroMQ msgpack"])
def test_contenders_deliver_equal_steps_and_are_measured(name):
    with ring_link.link(name, CORE) as link:
        ring_link.check_equal(link, SIZES)
        for gap in (1e-4, 0.0):
            seconds, share, latencies = ring_link.measure(link, 4160, gap, 20)
            assert seconds > 0
            assert len(latencies) == (20 if gap else 0)
            assert share >= 0
    assert not link.process.is_alive()


@pytest.mark.parametrize("name", ["ring", "multiprocessing.Queue"])
def test_a_producer_that_ends_is_named_and_not_waited_for(name):
    with ring_link.link(name, CORE) as link:
        killer = threading.Thread(target=_kill_after_some, args=(link,))
        killer.start()
        before = signal.getsignal(signal.SIGCHLD)
        with pytest.raises(BenchError, match=f"{name}.* ended") as raised:
            ring_link.measure(link, 4160, 1e-3, 10**9)
        killer.join()
        assert signal.getsignal(signal.SIGCHLD) is before
        assert "exit status -9" in str(raised.value)
        with pytest.raises(BenchError, match="exit status -9"):  # nor is the next message
            ring_link.measure(link, 4160, 1e-3, 1)


def _kill_after_some(link):
    while link.arrived.value < 20:
        time.sleep(0.001)
    link.process.kill()
