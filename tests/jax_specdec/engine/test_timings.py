"""What an engine measures, says and answers: times as histograms, log lines, its health."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import parser

from jax_specdec.control import Heartbeat, ProcessStats
from jax_specdec.control.heartbeat import NOTE_CHARS, NOTES_KEPT
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.timings import BOUNDS, Histogram, SlotTimes, Timings
from jax_specdec.engine.worker_session import WorkerSilent
from jax_specdec.engine.workers import Health
from jax_specdec.export import metrics
from tests.support.scene import Scene, long_requests
from tests.support.scripted_worker import ScriptedWorker


def taken(histogram):
    """Upper bounds of the buckets that have counts, with the counts."""
    bounds = (*BOUNDS, math.inf)
    return {bounds[place]: int(histogram.counts[place]) for place in histogram.counts.nonzero()[0]}


def test_a_duration_falls_under_its_bound():
    histogram = Histogram()
    for seconds in (0.0, 1e-5, 0.3, 0.5, 1e9, -1.0):
        histogram.take(seconds)
    assert taken(histogram) == {1e-5: 3, 0.5: 2, math.inf: 1}
    histogram.take_all(np.array([0.3, 0.02]), np.array([2, 3]))
    assert taken(histogram) == {1e-5: 3, 0.025: 3, 0.5: 4, math.inf: 1}
    assert histogram.total == pytest.approx(1e9 + 0.8 - 1 + 1e-5 + 0.66)


def test_the_times_of_a_slot():
    times, timings = SlotTimes(3), Timings()
    times.admit(0, 10.0)
    times.admit(1, None)  # it has had tokens elsewhere: the time since then is not known
    slots, counts = np.array([0, 1]), np.array([1, 2])
    times.tokens(slots, counts, 10.4, timings)
    assert (taken(timings.first_token), taken(timings.between_tokens)) == ({0.5: 1}, {})
    times.tokens(slots, counts, 10.6, timings)
    assert taken(timings.between_tokens) == {0.25: 1, 0.1: 2}  # 0.2 s for one, 0.1 s for each of 2
    assert timings.between_tokens.total == pytest.approx(0.4)
    assert times.leave(0) is None
    times.admit(0, 11.0)
    assert times.leave(0) == 11.0  # preempted before its first token: its wait goes on
    times.tokens(slots[:1], counts[:1], 11.4, timings)  # it was on its way, and is nobody's
    assert timings.first_token.counts.sum() == 1
    for now in (5.0, 5.5):
        times.message(now, timings)
    assert taken(timings.step) == {0.5: 1}


def run(**config):
    scene = Scene(num_slots=2, **config)
    scene.clock.tick = 0.01
    return scene.run(long_requests(6))


def test_every_request_and_every_token_is_measured_once():
    timings = run().engine.timings
    assert timings.queue.counts.sum() == timings.first_token.counts.sum() == 6
    # A first step's further tokens have no time of their own.
    assert 6 * 14 < timings.between_tokens.counts.sum() <= 6 * 19
    assert max(taken(timings.queue)) > 10 * min(taken(timings.queue))  # some waited for a slot
    assert timings.ring.counts.sum() > timings.step.counts.sum() > 20


def test_preempted_and_lost_requests_are_not_queued_twice():
    scene = Scene(num_slots=2, faults={0: [9]}, on_worker_loss="restart", resume_lost=True)

    def meddle(scene, n):
        if n % 7 == 0 and scene.engine.running:
            scene.engine.preempt(scene.engine.running[0])

    timings = scene.run(long_requests(6), meddle).engine.timings
    assert scene.engine.status[0].processor.preempted > 2
    assert timings.first_token.counts.sum() == timings.queue.counts.sum() == 6


def test_the_log_has_what_workers_note_once(caplog):
    """Notes come with heartbeats, of which each has the last ones again."""

    class Noting(ScriptedWorker):
        stats = None

        @property
        def heartbeat(self):
            self.stats = self.stats or ProcessStats()
            if self.sent > self.stats.heartbeat.noted:
                self.stats.note(f"compiled program {self.sent} in {self.sent}.5 s")
            noted = self.stats.heartbeat
            return replace(super().heartbeat, noted=noted.noted, notes=noted.notes)

    with caplog.at_level(logging.INFO, logger="jax_specdec.engine"):
        scene = Scene(worker=Noting)
        scene.clock.tick = 0.2  # a look at the heartbeat each time
        scene.run(long_requests(6))
    compiled = [line for line in caplog.messages if "compiled" in line]
    assert "process rank 0: compiled program 7 in 7.5 s" in compiled
    assert len(compiled) == len(set(compiled)) > 20


def test_of_many_notes_the_last_are_kept():
    stats = ProcessStats()
    before = stats.heartbeat
    for n in range(NOTES_KEPT + 5):
        stats.note(f"{n} " + "x" * 1000)
    after = Heartbeat.from_bytes(stats.heartbeat.to_bytes(), 1)
    notes = after.notes_since(before)
    assert [int(note.split()[0]) for note in notes] == list(range(5, NOTES_KEPT + 5))
    assert all(len(note) == NOTE_CHARS for note in notes)
    assert after.notes_since(after) == ()
    stats.note("one more")
    assert stats.heartbeat.notes_since(after) == ("one more",)


def test_health_where_nothing_can_be_served_or_nobody_listens():
    scene = Scene(faults={0: [2]}, on_worker_loss="continue")
    with pytest.raises(WorkerFailed):
        scene.run(long_requests())
    health = scene.engine.health()
    assert (health.alive, health.ready) == (False, False)
    assert "process rank 0: its worker is lost (the producer" in health.problems[1]

    scene = Scene()
    scene.clock.sleep(30)
    assert scene.engine.health().alive  # nobody has asked for anything
    next(scene.generate(long_requests()))
    assert scene.engine.health().problems == ()
    scene.clock.sleep(30)
    health = scene.engine.health()
    assert (health.alive, health.ready) == (False, True)
    assert "has not looked at its workers for 30 seconds" in health.problems[0]


def test_health_of_workers_that_load_or_ended_idle():
    class Loading(ScriptedWorker):
        heartbeat = property(lambda self: replace(super().heartbeat, ready=False))

    scene = Scene(worker=Loading)
    assert scene.engine.health() == Health(True, False, ())
    scene.workers[0].exit_status = -9
    said = ("process rank 0: its process has ended; the next request will report it",)
    assert scene.engine.health() == Health(False, False, said)
    scene = Scene()
    scene.round()  # who asks for updates will tell of it
    scene.workers[0].exit_status = -9
    health = scene.engine.health()
    assert (health.alive, health.ready) == (True, False)


@pytest.mark.parametrize("how", ["ended", "is being ended"])
@pytest.mark.parametrize(
    ("loss", "alive"),
    [
        ({}, False),
        ({"on_worker_loss": "continue"}, False),
        ({"on_worker_loss": "restart"}, True),
        ({"on_worker_loss": "restart", "max_restarts": 0}, False),
    ],
)
def test_health_counts_an_end_that_nobody_has_reported_yet(loss, alive, how):
    """Of a worker that has ended while nothing ran, or that is ended for its silence."""
    scene = Scene(num_prefill_ranks=1, **loss)  # a prefill worker alone serves nobody
    assert scene.engine.health() == Health(True, True, ())
    if how == "ended":
        scene.workers[0].exit_status = -9
    else:
        scene.engine_workers.end(scene.engine.sessions[0], WorkerSilent("no heartbeat"))
    health = scene.engine.health()
    assert (health.alive, health.ready) == (alive, False)


def test_prometheus_reads_the_histograms():
    engine = run().engine
    page = metrics.status_text(engine.status, engine.timings)
    families = {family.name: family for family in parser.text_string_to_metric_families(page)}
    family = families["jax_specdec_first_token_seconds"]
    assert family.type == "histogram"
    counts = [one.value for one in family.samples if not one.name.endswith("_sum")]
    assert counts == sorted(counts)  # those of the buckets, up to +Inf, and of all
    assert counts[-2:] == [6, 6]
    assert "jax_specdec_worker_up" in families
    assert metrics.timings_text(engine.timings) in page
