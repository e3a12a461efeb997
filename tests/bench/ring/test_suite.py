"""The ring's benchmark: all contenders deliver equal data, one message at a time."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bench.ring import link as ring_link
from bench.ring import suite as bench
from bench.ring.contenders import CONTENDERS, RingReceiver
from bench.timing import BenchError
from tests.support.processes import is_alive, wait_for

CORE = max(os.sched_getaffinity(0))
SIZES = [size for size, *_ in bench.CASES.values()]


CHECKED = ["ring", "ring, spin", "ring, no checksum", "multiprocessing.Queue",
           "multiprocessing.Pipe", "ZeroMQ raw bytes"]  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_contenders_deliver_equal_steps_and_are_measured(name):
    with ring_link.link(name, CORE) as link:
        ring_link.check_equal(link, SIZES)
        for gap in (1e-4, 0.0):
            seconds, share, latencies = ring_link.measure(link, 4160, gap, 20)
            assert seconds > 0
            assert len(latencies) == (20 if gap else 0)
            assert share >= 0
    assert not link.process.is_alive()


def test_a_transport_that_changes_the_data_is_refused(monkeypatch):
    class Liar(RingReceiver):
        def receive(self):
            time_ns, ids, logprobs, ranks = super().receive()
            return time_ns, ids, logprobs, np.flip(ranks)

    monkeypatch.setitem(CONTENDERS, "ring", (Liar, CONTENDERS["ring"][1]))
    with (
        ring_link.link("ring", CORE) as link,
        pytest.raises(BenchError, match="delivered other data"),
    ):
        ring_link.check_equal(link, SIZES)


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


def test_ctrl_c_is_for_this_process_alone(capfd):
    """The terminal sends it to all processes: the producer neither ends nor writes a traceback."""
    with ring_link.link("ring", CORE) as link:
        os.kill(link.process.pid, signal.SIGINT)
        ring_link.check_equal(link, SIZES)
        assert link.process.is_alive()
    assert capfd.readouterr().err == ""
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_producer_that_does_not_start_is_named(monkeypatch):
    receiver = type("R", (RingReceiver,), {"address": property(lambda _: None)})
    monkeypatch.setattr(receiver, "__init__", lambda self: None)
    monkeypatch.setattr(receiver, "close", lambda self: None)
    monkeypatch.setitem(CONTENDERS, "ring", (receiver, CONTENDERS["ring"][1]))
    with (
        pytest.raises(BenchError, match="the producer process of ring did not start"),
        ring_link.link("ring", CORE),
    ):
        raise AssertionError("it has no address")


def test_busy_loops_keep_their_cores_busy_and_end():
    before = children()
    with bench.busy_loops([CORE, CORE]):
        loops = children() - before
        assert len(loops) == 2
        while not all(used_cpu(pid) > 2 for pid in loops):  # ticks: they compute
            time.sleep(0.01)
        assert {frozenset(os.sched_getaffinity(pid)) for pid in loops} == {frozenset({CORE})}
    assert children() == before


def test_busy_loops_end_with_a_parent_that_is_killed():
    script = f"""
import os, time
from bench.ring.suite import busy_loops
with busy_loops([{CORE}]):
    print(open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read(), flush=True)
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    (loop,) = map(int, done.stdout.split())
    wait_for(lambda: not is_alive(loop))


def children():
    me = os.getpid()
    return {int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()}


def used_cpu(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_limits_are_those_of_their_own_case():
    """A limit of free cores is none beside busy loops, where the slowest hundredth has one."""
    taken = bench.Samples(loads=[3.0, 1.0, 2.0])
    for title in bench.CASES:
        for name in ("ring", "ring, block", "ZeroMQ msgpack"):
            slow = 5e-3 if name == "ring" else 2e-3
            taken.add(title, name, 1e-4, 0.1, [1e-4] * 90 + [slow] * 10)
    for title in bench.CASES:
        one = bench._comparison(title, taken, 3)
        beside = title.endswith("busy loops")
        assert one.settings["busy loops"] == (2 if beside else 0)
        assert one.settings["load"] == 2.0
        found = {target.what: target for target in one.targets}
        if title.startswith("16 KB, hot"):
            limit = found["speed over ZeroMQ msgpack"].limit
            assert limit == pytest.approx(1.0 if beside else 1.2)
        assert ("p99 over that of block" in found) == beside
        if beside:
            assert found["p99 over that of block"].measured == pytest.approx(2.5)
            assert found["p99 over that of block"].verdict == "MISSED"


def test_steps_have_the_size_that_the_tables_name():
    for size, *_ in bench.CASES.values():
        step = ring_link.arrays_of(size)
        assert size - 8 < 16 + sum(array.nbytes for array in step) <= size


def test_a_compiler_that_fails_leaves_the_bound_out(monkeypatch):
    monkeypatch.setattr(bench.shutil, "which", lambda name: "false")
    with bench.bound_program() as program:
        assert program is None


def test_the_bound_compiles_and_runs_where_there_is_a_compiler():
    with bench.bound_program() as program:
        if program is None:
            print("NOT RUN: no C compiler")
            return
        cores = (min(os.sched_getaffinity(0)), CORE)
        for gap in (1e-5, 0.0):
            assert bench.measure_bound(program, cores, 4160, gap, 100) > 0
