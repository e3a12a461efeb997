"""When a side may spin: after a span in which a core was free, by numbers that the tests give."""

import time

import pytest

from ipc import free_cores
from ipc.free_cores import LONGEST_SPAN_NS, FreeCores, available_ns
from tests.support.processes import in_thread

SPAN = free_cores.FIRST_SPAN_NS


class Machine:
    """A core of which `share` is free; asked through `cores`."""

    def __init__(self, share=1.0):
        self.share, self.now, self.available, self.asked = share, 10**12, 0.0, 0
        self.cores = FreeCores(self.ask)

    def ask(self):
        self.asked += 1
        return None if self.share is None else int(self.available)

    def look(self, after=0):
        self.now += after
        self.available += after * (self.share or 0)
        return self.cores.look(self.now)

    def spans_until_free(self):
        """Looks four times a span; the spans of FIRST_SPAN_NS until it may spin."""
        for quarters in range(10_000):
            if self.look(SPAN // 4):
                return quarters // 4
        raise AssertionError("it never may")


def test_a_core_must_be_free_for_a_whole_span():
    machine = Machine()
    assert not machine.look()
    assert not machine.look(SPAN - 1)
    assert machine.look(1)
    assert machine.asked == 2
    machine.share = 0.0
    assert machine.look(10 * SPAN)  # until it is lost
    assert machine.asked == 2  # while it may spin, nothing is asked


@pytest.mark.parametrize(
    ("share", "free"),
    [(None, False), (0.0, False), (0.7, False), (0.8, True), (3.9, True)],  # of several cores
)
def test_three_quarters_of_a_core_are_free_enough(share, free):
    machine = Machine(share)
    for _ in range(40):
        machine.look(SPAN // 4)
    assert machine.cores.spin == free


def test_what_was_free_before_a_long_pause_proves_nothing():
    machine = Machine()
    machine.look()
    assert not machine.look(free_cores.STALE_SPANS * SPAN + 1)
    assert not machine.look(SPAN - 1)
    assert machine.look(1)


def test_time_of_another_thread_is_not_compared():
    machine = Machine()
    machine.look()
    in_thread(machine.look, SPAN)
    assert not machine.cores.spin
    assert not machine.look(SPAN)  # nor is its own with that of the other
    assert machine.look(SPAN)


def test_the_system_tells_of_this_thread():
    before = available_ns()
    begun = time.thread_time_ns()
    while time.thread_time_ns() - begun < 5_000_000:
        pass
    assert available_ns() - before >= 5_000_000


CORES = ["cpu  9 9 9 9 9", "cpu0 1 2 3 40 2 5", "cpu1 1 1 1 1 1 1", "cpu7 9 9 9 300 1 0", "intr 7"]


@pytest.mark.parametrize(
    ("text", "ticks"),
    [(None, 0), ("", 0), ("cpu  1 2 3", 0), ("cpu  1\ncpu0 1 2 x y\n", 0), ("\n".join(CORES), 343)],
)
def test_idle_time_is_that_of_the_cores_that_this_thread_may_use(
    monkeypatch, tmp_path, text, ticks
):
    path = tmp_path / "stat"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(free_cores, "STAT", str(path))
    monkeypatch.setattr(free_cores, "thread_time_ns", lambda: 0)
    monkeypatch.setattr(free_cores.os, "sched_getaffinity", lambda pid: {0, 7, 9})
    assert (available_ns() or 0) == ticks * 10_000_000


def test_spans_double_where_the_core_is_lost_soon_and_only_there():
    machine, spans = Machine(), []
    for _ in range(12):
        machine.spans_until_free()
        machine.cores.lost(machine.now)
        machine.look()
        spans.append(machine.cores.span_ns // SPAN)
    assert spans == [min(2**n, LONGEST_SPAN_NS // SPAN) for n in range(1, 13)]
    assert machine.spans_until_free() == LONGEST_SPAN_NS // SPAN - 1
    machine.now += free_cores.SOON_SPANS * LONGEST_SPAN_NS
    machine.cores.lost(machine.now)
    machine.look()
    assert machine.spans_until_free() == 0
