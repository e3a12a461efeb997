"""When a waiter sleeps and spins, on a simulated clock: no test depends on timing."""

import os

import numpy as np
import posix_ipc
import pytest

from ipc import RingReader, RingWriter, waiting
from ipc.free_cores import FIRST_SPAN_NS, FreeCores
from ipc.rhythm import LEAD_NS, NEVER
from ipc.waiting import GLANCES, POLICIES, Waiter

US, MS = 1_000, 1_000_000
LOOK = US  # how long a look at the clock or at the semaphore takes here
OTHERS = 2500 * US  # how long another program keeps the core


class Clockwork:
    """A semaphore whose units come at given times, and the clock that tells these times.

    The waiter has seen that its core is free, unless `new` is given.
    """

    def __init__(self, monkeypatch, policy="predict", new=False):
        self.now = 0
        self.hogged = 0  # time in which other programs had the core
        self.due = []  # when units come that have not been taken
        self.spun = self.slept = 0  # units that came to a spinning, and to a sleeping waiter
        self.slice = NEVER  # so long may it run until another program gets its core
        self.ran = 0  # since it slept or lost its core
        self.lost = 0  # units that came while another program had the core
        self.waiter = Waiter(self, policy, lambda: None)
        self.waiter.cores = FreeCores(lambda: self.now - self.hogged)
        self.waiter.cores.spin = not new
        monkeypatch.setattr(waiting, "monotonic_ns", self.clock)

    def run(self):
        self.now += LOOK
        self.ran += LOOK
        if self.ran > self.slice:
            self.ran = 0
            self.others_run()

    def others_run(self):
        before = self.now
        self.now += OTHERS
        self.hogged += OTHERS
        self.lost += any(before < moment <= self.now for moment in self.due)

    def clock(self):
        self.run()
        return self.now

    @property
    def value(self):
        self.run()
        return sum(moment <= self.now for moment in self.due)

    def acquire(self, seconds):
        assert seconds == 0
        if not self.due or self.due[0] > self.now:
            raise posix_ipc.BusyError
        self.due.pop(0)

    def waiting(self, until):
        self.ran, began = 0, self.now
        yield from self.asleep(until)
        self.hogged += (self.now - began) * (self.slice != NEVER)

    def asleep(self, until):
        if self.due and self.due[0] <= until:
            self.slept += self.due[0] > self.now
            self.now = max(self.now, self.due.pop(0))
            yield 0
        else:
            self.now = max(self.now, until)

    def take(self, gap, work=50 * US):
        """Waits for a unit that comes `gap` after now, then works for `work`."""
        self.due.append(self.now + gap)
        slept = self.slept
        assert self.waiter.take(None)
        self.spun += self.slept == slept
        self.waiter.held.clear()
        self.now += work

    def poll(self, gap, each):
        """Waits for a unit that comes `gap` after now, in waits of `each`."""
        self.due.append(self.now + gap)
        while not self.waiter.take(self.now + each):
            pass
        self.waiter.held.clear()


@pytest.fixture
def scene(monkeypatch):
    """A waiter that predicts, and knows that its core is free."""
    return Clockwork(monkeypatch)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dies", [0, 3, 4.9, 7, 30])
def test_a_peer_that_is_gone_is_noticed_within_50_ms(monkeypatch, policy, dies):
    """The peer may die before a unit is expected, while the waiter spins, and long after."""
    scene = Clockwork(monkeypatch, policy)
    lost_units(scene, 5)
    dies = scene.now + int(dies * MS)
    scene.waiter.obstacle = lambda: ZeroDivisionError() if scene.now >= dies else None
    with pytest.raises(ZeroDivisionError):
        scene.waiter.take(dies + 1000 * MS)
    assert scene.now - dies <= 50 * MS


@pytest.mark.parametrize(
    ("mean", "spread", "least"), [(35, 0.8, 0.8), (35, 0.01, 0.9), (5, 0.2, 0.9)]
)
def test_a_waiter_spins_longer_where_long_intervals_vary(scene, mean, spread, least):
    spinning, window = [], scene.waiter.spin_window

    def noted(now):
        start, until = window(now)
        spinning.append(until - start)
        return start, until

    scene.waiter.spin_window = noted
    for number, gap in enumerate(np.random.default_rng(0).normal(mean * MS, spread * MS, 350)):
        scene.spun *= number != 50  # by then it has learned
        scene.take(int(gap))
    assert scene.spun / 300 > least
    if least == 0.8:
        assert 3 * LEAD_NS < max(spinning) <= mean * MS // 7  # twice a sixteenth, and a little
    else:
        assert spinning[-1] == 2 * LEAD_NS


def lost_units(scene, count, gap=5 * MS):
    """Takes units; returns the shares that came while another program ran, and to a spinner."""
    scene.lost = scene.spun = 0
    for _ in range(count):
        scene.take(gap)
    return scene.lost / count, scene.spun / count


@pytest.mark.parametrize("gap", [100 * US, 5 * MS])
@pytest.mark.parametrize("new", [True, False])
def test_beside_busy_programs_it_sleeps(monkeypatch, gap, new):
    """The slowest hundredth of the first 200 units must be that of a side that sleeps."""
    scene = Clockwork(monkeypatch, new=new)
    scene.slice = 60 * US  # every spin loses its core
    lost, spun = lost_units(scene, 200, gap)
    assert (spun == 0) == new
    assert lost == 0 if new else 0 < lost <= 0.005


@pytest.mark.parametrize("gap", [100 * US, 5 * MS])
def test_a_new_side_spins_once_a_core_was_free_for_a_while(monkeypatch, gap):
    scene = Clockwork(monkeypatch, new=True)
    assert lost_units(scene, 3 * FIRST_SPAN_NS // gap // 2, gap)[1] < 0.7
    assert lost_units(scene, 100, gap)[1] > 0.95


def test_a_yield_of_the_core_counts_as_a_wait(scene, monkeypatch):
    """A side that is confined to one core yields while it spins, and its peer may be elsewhere."""
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda pid: {3})
    monkeypatch.setattr(waiting.os, "sched_yield", scene.others_run)
    assert 0 < lost_units(scene, 1000)[0] < 0.01


def test_a_core_that_is_lost_seldom_costs_few_units(scene):
    lost_units(scene, 10)
    for _ in range(2):  # the rests do not add up: the second is as short as the first
        scene.slice = 60 * US
        lost_units(scene, 1)
        scene.slice = NEVER
        assert lost_units(scene, 1000)[1] > 0.8


def test_a_lost_core_ends_the_spinning_of_that_wait(scene):
    lost_units(scene, 5)
    scene.slice, spun = 60 * US, []
    scene.waiter.cores.available = lambda: 0
    spin = scene.waiter.spin
    scene.waiter.spin = lambda until: spun.append(until) or spin(until)
    assert not scene.waiter.take(scene.now + 100 * MS)
    assert len(spun) == 1
    scene.waiter.policy = "spin"  # who asked for it gets it
    assert not scene.waiter.take(scene.now + 100 * MS)
    assert len(spun) > 10


@pytest.mark.parametrize(("interval", "spread", "poll"), [(35, 1, 1), (400, 140, 50)])
def test_many_short_waits_for_one_unit_spin_no_longer_than_one(scene, interval, spread, poll):
    """An engine waits so between two heartbeats, and so does a server that polls."""
    spin, spinning = scene.waiter.spin, []

    def noted(until):
        begun = scene.now
        taken = spin(until)
        spinning.append(scene.now - begun)
        return taken

    scene.waiter.spin = noted
    for gap in np.random.default_rng(0).normal(interval, spread, 30):
        scene.poll(int(max(gap, 1) * MS), poll * MS)
        spinning.clear()
    begun = scene.now
    while scene.now < begun + 5 * interval * MS:  # nothing comes
        assert not scene.waiter.take(scene.now + poll * MS)
    assert 0 < sum(spinning) < interval * MS // 7


def test_many_short_waits_learn_a_pause_once(scene):
    for gap in (*[35] * 30, 3000, 35):
        scene.poll(gap * MS, MS)
    for _ in range(5):
        scene.poll(0, MS)  # a unit that was there at once teaches nothing
        assert not scene.waiter.take(scene.now + MS)
    assert 35 * MS < scene.waiter.rhythm.interval_ns < 45 * MS


@pytest.mark.parametrize(("cores", "peer"), [({3}, {3}), ({3}, {2}), ({3}, {2, 3}), ({0, 1}, {0})])
def test_a_spinning_side_yields_where_both_share_one_core(monkeypatch, cores, peer):
    """Elsewhere it would give time slices to other programs."""
    scene, yields = Clockwork(monkeypatch, "spin"), []
    scene.waiter.peer_shares = lambda mine: peer <= mine
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(waiting.os, "sched_yield", lambda: yields.append(scene.now))
    scene.take(5 * MS)
    if cores == peer:
        assert max(np.diff([0, *yields, 5 * MS])) <= 2 * GLANCES * LOOK
        yields.clear()
        monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda pid: {2, 3})  # as it is now
        scene.now += waiting.AFFINITY_NS
        scene.take(5 * MS)
    assert not yields


def test_a_ring_asks_where_its_peer_runs(monkeypatch):
    with RingReader.create(2, 64) as reader:
        assert reader._items.peer_shares({0})  # nobody attached: it may come to this core
        with RingWriter.attach(reader.name) as writer:
            reader.wait_attached(1)
            everywhere = os.sched_getaffinity(0) | {10_000, 10_001}
            for waiter in (reader._items, reader._freed, writer._items, writer._freed):
                assert waiter.peer_shares(everywhere)
                assert not waiter.peer_shares({10_000})
