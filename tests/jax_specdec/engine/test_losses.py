"""Lost workers: how they are reported, what becomes of their requests, and which workers go on."""

import contextlib
import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ipc.errors import RingTimeout
from jax_specdec.control import Phase
from jax_specdec.declaration import Serves
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.records import output_processor
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.output_processor import ProcessorError
from tests.support.processor_messages import target, tokens
from tests.support.scene import Scene, check, long_requests
from tests.support.scripted_worker import ScriptedWorker
from tests.support.streaming import StreamingScene

RESUME = {"on_worker_loss": "restart", "resume_lost": True}


def reasons(scene):
    return {name: scene.finish_reason(name) for name in scene.records}


def losses(scene):
    return [update for update in scene.updates if update.lost]


def all_end_well(scene):
    assert {*reasons(scene).values()} == {FinishReason.LENGTH}


def test_a_lost_rank_is_reported_and_the_others_go_on():
    scene = Scene(num_ranks=2, faults={1: [3]}, on_worker_loss="continue").run(long_requests())
    (report,) = losses(scene)
    assert report.process_rank == 1
    assert "rank 1" in str(report.lost)
    lost = [record.request_id for record in report.records]
    assert len(lost) == 2
    for name, reason in reasons(scene).items():
        assert reason is (FinishReason.WORKER_LOST if name in lost else FinishReason.LENGTH)
    assert [status.alive for status in scene.engine.status] == [True, False]


@pytest.mark.parametrize(
    "options",  # decode workers do without one that prefills
    [{"num_ranks": 2, "faults": {1: [5]}}, {"num_prefill_ranks": 1, "faults": {1: [2]}}],
)
def test_lost_requests_may_go_on_elsewhere(options):
    scene = Scene(**options, on_worker_loss="continue", resume_lost=True)
    all_end_well(scene.run(long_requests()))


def test_a_lost_rank_may_be_restarted(caplog):
    requests = long_requests()
    with caplog.at_level(logging.INFO, logger="jax_specdec.engine"):
        scene = Scene(faults={0: [4, 2]}, **RESUME, max_attempts=3, num_drafts=5).run(requests)
    all_end_well(scene)
    assert len(scene.workers) == 3
    # Successors are told what the requests need that wait for them.
    assert scene.resumed == [None, *2 * [Serves.of(request.params for request in requests)]]
    assert [update.process_rank for update in losses(scene)] == [0, 0]
    (status,) = scene.engine.status
    assert (status.restarts, status.alive) == (2, True)
    assert status.ring.messages == scene.workers[2].sent
    assert status.statistics.num_tokens == 6 * 20  # of all its workers
    for words, times in (("a worker is lost", 2), ("a new worker was", 2), ("takes requests", 3)):
        assert sum(words in line for line in caplog.messages) == times
    assert not any("\n" in line for line in caplog.messages)
    # What a worker may send is known of its successors too.
    message = target(0, tokens(1, drafts=6))
    with pytest.raises(ProcessorError, match=r"slot 0: 6 drafts; .* proposes 5 at most"):
        output_processor.step(scene.engine.sessions[0].state, message)


class Hanging(ScriptedWorker):
    """Sends some messages, and then nothing, without ending; its heart beats all the same."""

    pid = 77
    phase, members, until = Phase.STEPPING, (), 5000.0
    clock = None

    def receive(self, timeout):
        if self.sent >= 5 and self.clock.time < self.until:
            self.clock.sleep(timeout)
            raise RingTimeout
        return super().receive(timeout)

    @property
    def heartbeat(self):
        return replace(super().heartbeat, phase=self.phase, members=self.members)


class Stopped(Hanging):
    """Sends some messages, and then not even heartbeats."""

    @property
    def heartbeat(self):
        heartbeat = super().heartbeat
        self.beats -= self.sent >= 5
        return replace(heartbeat, beats=self.beats)


@pytest.mark.parametrize(
    ("worker", "config", "works_until", "said", "seconds"),
    [
        (Hanging, {"max_silence": 5}, 0, "it made no progress for 5 seconds (phase: stepping)", 5),
        (Hanging, {}, 0, "it made no progress for 60 seconds (phase: stepping)", 60),
        (Stopped, {"max_silence": 50}, 0, "no heartbeat came for 10 seconds", 10),
        # The kernel says that it works: it is lost once it has not for half of the time.
        (Stopped, {"max_silence": None}, 300, "no heartbeat came for 10 seconds", 305),
    ],
)
def test_a_worker_that_is_silent_is_lost(worker, config, works_until, said, seconds):
    scene = Scene(**RESUME, worker=worker, **config)
    (session,) = scene.engine.sessions
    assert session.liveness.activity.__self__._path == Path("/proc/77/stat")
    session.liveness.activity = lambda now: now < works_until
    hanging = scene.workers[0]
    hanging.clock = scene.clock
    scene.worker = ScriptedWorker  # in its place
    all_end_well(scene.run(long_requests()))
    assert (hanging.stopped, hanging.sent) == (True, 5)
    (report,) = losses(scene)
    assert said in str(report.lost)
    assert seconds < scene.clock.time < seconds + 2


@pytest.mark.parametrize(
    ("phase", "members"),
    [(Phase.COMPILING, ()), (Phase.STEPPING, ("stepping", "compiling 2 (step)"))],
)
def test_a_worker_that_compiles_is_not_lost(phase, members):
    """It, or a follower, is given an hour, and then it steps."""
    Compiling = type("Compiling", (Hanging,), {"phase": phase, "members": members, "until": 3600.0})
    scene = Scene(worker=Compiling, max_silence=5)
    scene.workers[0].clock = scene.clock
    assert scene.engine.status[0].phase == (str(phase), *members)
    all_end_well(scene.run(long_requests()))
    assert scene.clock.time > 3600
    assert not losses(scene)


def test_a_worker_that_has_nothing_to_do_is_not_silent():
    scene = Scene(max_silence=5)
    while scene.clock.time < 20:
        scene.round()
    assert scene.engine.status[0].alive


def test_restarts_wait_twice_as_long_each_and_end():
    starts = []

    class Noted(Scene):
        def start(self, *arguments, **options):
            starts.append(self.clock.time)
            return super().start(*arguments, **options)

    scene = Noted(faults={0: [0] * 9}, **RESUME, max_restarts=8, max_attempts=99, restart_delay=0.5)
    with pytest.raises(WorkerFailed, match="rank 0"):
        scene.run(long_requests(1))
    for (before, after), planned in zip(
        pairwise(starts), [0.5, 1, 2, 4, 8, 16, 30, 30], strict=True
    ):
        assert planned <= after - before < planned + 0.2
    with pytest.raises(WorkerFailed):  # no worker is left
        next(scene.engine.generate(long_requests()))


@pytest.mark.parametrize(("waits", "goes_on"), [((0, 95, 0), False), ((60,) * 9, True)])
def test_losses_count_until_they_are_as_old_as_the_window(waits, goes_on):
    scene = StreamingScene(**RESUME, max_restarts=2, restart_window=100.0)

    with contextlib.nullcontext() if goes_on else pytest.raises(WorkerFailed):
        for count, seconds in enumerate(waits, 1):
            scene.workers[-1].dies_after = scene.workers[-1].sent
            while len(scene.workers) == count:
                scene.round()
            scene.clock.time += seconds


def test_restarts_of_a_worker_that_never_is_ready_end():
    """However long each takes to fail."""

    class Broken(ScriptedWorker):
        heartbeat = property(lambda self: replace(super().heartbeat, ready=False))

        def try_receive(self):
            scene.clock.time += 1000
            self.dies_after = self.sent
            return super().try_receive()

    scene = StreamingScene(worker=Broken, num_slots=1, on_worker_loss="restart")
    scene.submit(long_requests(1)[0])
    with pytest.raises(WorkerFailed):
        scene.finish()
    assert len(scene.workers) == 4


def test_when_everything_stops_every_request_is_closed():
    def meddle(scene, n):
        if n == 5:
            scene.engine.preempt("r0")

    scene = Scene(num_ranks=2, num_slots=1, num_prefill_ranks=1, faults={1: [9]})
    with pytest.raises(WorkerFailed, match="rank 1"):
        scene.run(long_requests(9), meddle)
    for records in scene.records.values():  # those that never got a slot have some too
        ends = [record.finish_reason for record in records if record.finish_reason]
        assert ends.count(FinishReason.WORKER_LOST) == 1 or ends[-1] is FinishReason.LENGTH
        assert records[-1].finish_reason is ends[-1]
    began = [name for name in scene.records if scene.tokens(name)]
    assert 3 < len(began) < 9  # two in slots, others between the prefill worker and a slot


@pytest.mark.parametrize(
    ("refusals", "restarts", "reason"),
    [(2, 3, FinishReason.LENGTH), (99, 4, FinishReason.WORKER_LOST)],
)
def test_a_successor_that_cannot_be_started_is_tried_again_later(refusals, restarts, reason):
    """And where it never can be, every request has its end all the same."""
    refused = []

    class Full(Scene):
        def start(self, *arguments, **options):
            if self.workers and len(refused) < refusals:
                refused.append(self.clock.time)
                raise OSError("too many open files")
            return super().start(*arguments, **options)

    requests = long_requests(3)
    scene = Full(faults={0: [4]}, **RESUME, max_restarts=4)
    with contextlib.nullcontext() if refusals == 2 else pytest.raises(WorkerFailed):
        scene.run(requests)
    check(scene, requests)
    assert {*reasons(scene).values()} == {reason}
    assert (len(refused), scene.engine.status[0].restarts) == (min(refusals, 4), restarts)


def test_a_request_can_be_aborted_while_its_lost_worker_ends():
    class Slow(ScriptedWorker):
        ended = False  # it takes its time to

    def meddle(scene, n):
        worker = scene.workers[1]
        if worker.stopped and not worker.ended:
            (name,) = scene.engine.sessions[1].request_ids
            assert scene.engine.abort(name)
            aborted.append(name)
            worker.ended = True

    requests, aborted = long_requests(4), []
    scene = Scene(num_ranks=2, num_slots=1, worker=Slow, faults={1: [3]},
                  on_worker_loss="continue", resume_lost=True)  # fmt: skip
    scene.run(requests, meddle)
    assert aborted == [n for n, why in reasons(scene).items() if why is FinishReason.ABORT]
    assert [*reasons(scene).values()].count(FinishReason.LENGTH) == 3


def test_a_successor_for_whom_nobody_waits_gets_ready_for_all():
    scene = Scene(faults={0: [0]}, **RESUME)
    scene.round(3)
    scene.clock.sleep(60)
    scene.round(3)
    assert scene.resumed == [None, None]
