"""Lost workers: how they are reported, what becomes of their requests, and which workers go on."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ipc.errors import RingTimeout
from jax_specdec.control import Phase
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.records.batch import FinishReason
from tests.support.scene import Scene, check, long_requests
from tests.support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.fast


def test_a_lost_rank_is_reported_and_the_others_go_on():
    requests = long_requests()
    scene = Scene(num_ranks=2, faults={1: [3]}, on_worker_loss="continue").run(requests)
    check(scene, requests)
    (report,) = [update for update in scene.updates if update.lost]
    assert report.process_rank == 1
    assert "rank 1" in str(report.lost)
    lost = [record.request_id for record in report.records]
    assert len(lost) == 2
    for request in requests:
        ended = FinishReason.WORKER_LOST if request.id in lost else FinishReason.LENGTH
        assert scene.finish_reason(request.id) is ended
    assert [status.alive for status in scene.engine.status] == [True, False]


def test_lost_requests_may_go_on_elsewhere():
    requests = long_requests()
    scene = Scene(num_ranks=2, faults={1: [5]}, on_worker_loss="continue", resume_lost=True)
    scene.run(requests)
    check(scene, requests)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}
    (report,) = [update for update in scene.updates if update.lost]
    assert len(report.records) == 0 or report.process_rank == 1


def test_a_lost_rank_may_be_restarted():
    requests = long_requests()
    scene = Scene(faults={0: [4, 2]}, on_worker_loss="restart", resume_lost=True, max_attempts=3)
    scene.run(requests)
    check(scene, requests)
    assert len(scene.workers) == 3
    assert [update.process_rank for update in scene.updates if update.lost] == [0, 0]
    (status,) = scene.engine.status
    assert (status.restarts, status.alive) == (2, True)
    assert status.ring.messages == scene.workers[2].sent
    assert status.statistics.num_tokens == 6 * 20  # of all its workers


class Hanging(ScriptedWorker):
    """Sends some messages, and then nothing, without ending; its heart beats all the same."""

    phase, members = Phase.STEPPING, ()
    clock = None

    def receive(self, timeout, *, rehearse=None):
        if self.sent >= 5:
            self.clock.sleep(timeout)
            assert self.clock.time < 5000, "nobody takes it for lost"
            raise RingTimeout
        return super().receive(timeout, rehearse=rehearse)

    @property
    def pulse(self):
        return replace(super().pulse, phase=self.phase, members=self.members)


class Stopped(Hanging):
    """Sends some messages, and then not even heartbeats."""

    @property
    def pulse(self):
        pulse = super().pulse
        self.beats -= self.sent >= 5
        return replace(pulse, beats=self.beats)


def run_hanging(worker, **config):
    requests = long_requests()
    scene = Scene(on_worker_loss="restart", resume_lost=True, worker=worker, **config)
    scene.workers[0].clock = scene.clock
    scene.worker = ScriptedWorker  # in its place
    scene.run(requests)
    check(scene, requests)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}
    assert scene.workers[0].stopped
    assert scene.workers[0].sent == 5
    (report,) = [update for update in scene.updates if update.lost]
    return str(report.lost), scene.clock


@pytest.mark.parametrize(("config", "seconds"), [({"max_silence": 5}, 5), ({}, 60)])
def test_a_worker_that_makes_no_progress_is_lost(config, seconds):
    said, clock = run_hanging(Hanging, **config)
    assert f"it made no progress for {seconds} seconds (phase: stepping)" in said
    assert seconds < clock.time < seconds + 2


def test_a_worker_without_a_heartbeat_is_lost_sooner():
    said, clock = run_hanging(Stopped, max_silence=50)
    assert "no heartbeat came for 10 seconds" in said
    assert 10 < clock.time < 12


@pytest.mark.parametrize("who", ["the worker", "a follower"])
def test_a_worker_that_compiles_is_not_lost(who):
    """It is given an hour, and then it steps."""

    class Compiling(Hanging):
        phase = Phase.COMPILING if who == "the worker" else Phase.STEPPING
        members = ("stepping", "compiling 2 (step)") if who == "a follower" else ()

        def receive(self, timeout, *, rehearse=None):
            if self.clock.time > 3600:
                return ScriptedWorker.receive(self, timeout, rehearse=rehearse)
            return super().receive(timeout, rehearse=rehearse)

    scene = Scene(worker=Compiling, max_silence=5)
    scene.workers[0].clock = scene.clock
    (status,) = scene.engine.status
    assert status.phase == (str(Compiling.phase), *Compiling.members)
    scene.run(long_requests())
    check(scene, long_requests())
    assert scene.clock.time > 3600
    assert not [update for update in scene.updates if update.lost]


def test_an_engine_that_was_away_itself_takes_nobody_for_silent():
    """A caller may take its time between two updates: that is not the worker's silence."""
    scene = Scene(max_silence=5)

    def meddle(scene, n):
        scene.clock.sleep(30)

    scene.run(long_requests(), meddle)
    check(scene, long_requests())
    assert scene.clock.time > 600
    assert not [update for update in scene.updates if update.lost]


def test_restarts_come_to_an_end():
    scene = Scene(faults={0: [0] * 9}, on_worker_loss="restart", max_restarts=2)
    with pytest.raises(WorkerFailed, match="rank 0"):
        scene.run(long_requests())
    assert len(scene.workers) == 3
    assert scene.clock.slept  # before each of the two, longer each time
    with pytest.raises(WorkerFailed):  # no worker is left
        next(scene.engine.generate(long_requests()))


def test_each_restart_waits_twice_as_long_as_the_one_before():
    starts = []

    class Noted(Scene):
        def start(self, *arguments, **options):
            starts.append(self.clock.time)
            return super().start(*arguments, **options)

    scene = Noted(faults={0: [0] * 9}, on_worker_loss="restart", resume_lost=True,
                  max_restarts=8, max_attempts=99, restart_delay=0.5)  # fmt: skip
    with pytest.raises(WorkerFailed):
        scene.run(long_requests(1))
    waits = [after - before for before, after in pairwise(starts)]
    assert len(waits) == 8
    for wait, planned in zip(waits, [0.5, 1, 2, 4, 8, 16, 30, 30], strict=True):
        assert planned <= wait < planned + 0.2


def test_when_everything_stops_every_request_is_closed():
    requests = long_requests(9)

    def meddle(scene, n):
        if n == 5:
            scene.engine.preempt("r0")

    scene = Scene(num_ranks=2, num_slots=1, num_prefill_ranks=1, faults={1: [9]})
    with pytest.raises(WorkerFailed, match="rank 1"):
        scene.run(requests, meddle)
    assert all(scene.records.values())  # those that never got a slot too
    for records in scene.records.values():
        ends = [record.finish_reason for record in records if record.finish_reason]
        assert ends.count(FinishReason.WORKER_LOST) == 1 or ends[-1] is FinishReason.LENGTH
        assert records[-1].finish_reason is ends[-1]
    began = [name for name in scene.records if scene.tokens(name)]
    assert 3 < len(began) < 9  # two in slots, others between the prefill worker and a slot


def test_without_its_prefill_worker_an_engine_decodes_all_the_same():
    requests = long_requests()
    scene = Scene(num_prefill_ranks=1, faults={1: [2]}, on_worker_loss="continue",
                  resume_lost=True)  # fmt: skip
    scene.run(requests)
    check(scene, requests)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}


@pytest.mark.parametrize("refusals", [2, 99])
def test_a_successor_that_cannot_be_started_is_tried_again_later(refusals):
    class Full(Scene):
        def start(self, *arguments, **options):
            if self.workers and len(self.refused) < refusals:
                self.refused.append(self.clock.time)
                raise OSError("too many open files")
            return super().start(*arguments, **options)

    requests = long_requests(3)
    scene = Full(faults={0: [4]}, on_worker_loss="restart", resume_lost=True, max_restarts=4)
    scene.refused = []
    if refusals == 2:
        scene.run(requests)
        check(scene, requests)
        assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}
        assert scene.engine.status[0].restarts == 3
    else:  # every request has its end all the same
        with pytest.raises(WorkerFailed):
            scene.run(requests)
        assert len(scene.refused) == 4
        assert {scene.finish_reason(r.id) for r in requests} == {FinishReason.WORKER_LOST}


def test_a_request_can_be_aborted_while_its_lost_worker_ends():
    class Slow(ScriptedWorker):
        """Takes its time to end."""

        ended = False

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
    check(scene, requests)
    reasons = {request.id: scene.finish_reason(request.id) for request in requests}
    assert aborted == [name for name in reasons if reasons[name] is FinishReason.ABORT]
    assert list(reasons.values()).count(FinishReason.LENGTH) == 3
