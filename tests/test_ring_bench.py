"""The ring's benchmark measures what it says: equal data, one message at a time."""

import os

import numpy as np
import pytest

from bench import ring as bench
from bench.ring_contenders import CONTENDERS, RingReceiver
from bench.timing import BenchError

CORE = max(os.sched_getaffinity(0))


@pytest.mark.parametrize("name", ["ring", "ring, spin", "multiprocessing.Queue"])
def test_contenders_deliver_equal_steps_and_are_measured(name):
    with bench.link(name, CORE) as link:
        bench.check_equal(name, link)
        for gap in (1e-4, 0.0):
            seconds, share, latencies = bench.measure(link, 4160, gap, 20)
            assert 0 < seconds < 1
            assert len(latencies) == (20 if gap else 0)
            assert 0 <= share < 4
    assert not link.process.is_alive()


def test_a_transport_that_changes_the_data_is_refused(monkeypatch):
    class Liar(RingReceiver):
        def receive(self):
            time_ns, ids, logprobs, ranks = super().receive()
            return time_ns, ids, logprobs, np.flip(ranks)

    monkeypatch.setitem(CONTENDERS, "ring", (Liar, CONTENDERS["ring"][1]))
    with (
        bench.link("ring", CORE) as link,
        pytest.raises(BenchError, match="delivered other data"),
    ):
        bench.check_equal("ring", link)


def test_steps_have_the_size_that_the_tables_name():
    for size, *_ in bench.CASES.values():
        step = bench.arrays_of(size)
        assert size - 8 < 16 + sum(array.nbytes for array in step) <= size


def test_the_bound_compiles_and_runs_where_there_is_a_compiler():
    with bench.bound_program() as program:
        if program is None:
            print("NOT RUN: no C compiler")
            return
        cores = (min(os.sched_getaffinity(0)), CORE)
        for gap in (1e-5, 0.0):
            assert 0 < bench.measure_bound(program, cores, 4160, gap, 100) < 1
