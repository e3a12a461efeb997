"""Lost workers: how they are reported, what becomes of their requests, and which workers go on."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ipc.errors import RingTimeout
from jax_specdec.control import Admit, Phase
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

    phase = Phase.STEPPING
    clock = None

    def receive(self, timeout, *, rehearse=None):
        if self.sent >= 5:
            self.clock.sleep(timeout)
            raise RingTimeout
        return super().receive(timeout, rehearse=rehearse)

    @property
    def pulse(self):
        return replace(super().pulse, phase=self.phase)


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


def test_a_worker_that_makes_no_progress_is_lost():
    said, clock = run_hanging(Hanging, max_silence=5)
    assert "it made no progress for 5 seconds (phase: stepping)" in said
    assert 5 < clock.time < 7


def test_a_worker_without_a_heartbeat_is_lost_sooner():
    said, clock = run_hanging(Stopped, max_silence=50)
    assert "no heartbeat came for 10 seconds" in said
    assert 10 < clock.time < 12


def test_a_worker_that_compiles_is_not_lost():
    """It is given an hour, and then it steps."""

    class Compiling(Hanging):
        phase = Phase.COMPILING

        def receive(self, timeout, *, rehearse=None):
            if self.clock.time > 3600:
                return ScriptedWorker.receive(self, timeout, rehearse=rehearse)
            return super().receive(timeout, rehearse=rehearse)

    scene = Scene(worker=Compiling, max_silence=5)
    scene.workers[0].clock = scene.clock
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
    stream = scene.engine.generate(long_requests())
    closed = [record.finish_reason for _ in range(6) for record in next(stream).records]
    assert closed == [FinishReason.WORKER_LOST] * 6
    with pytest.raises(WorkerFailed):  # no worker is left
        next(stream)


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


class Poisoned(ScriptedWorker):
    """Dies when it runs one request, in whose company ever."""

    POISON = "r77"

    def advance(self):
        super().advance()
        if self.dies_after is None and any(
            isinstance(command, Admit) and command.request.id == self.POISON
            for command in self.commands
        ):
            self.dies_after = self.sent + 2


def test_a_request_that_ends_its_workers_takes_no_other_with_it():
    """200 requests on 4 ranks, one of which kills its worker: the others are served."""
    requests = long_requests(200)
    scene = Scene(num_ranks=4, num_slots=4, worker=Poisoned, on_worker_loss="restart",
                  resume_lost=True)  # fmt: skip
    companions = []

    def meddle(scene, n):
        for session in scene.engine.sessions:
            if Poisoned.POISON in session.request_ids:
                companions.append(len(session.request_ids) - 1)

    scene.run(requests, meddle)
    check(scene, requests)
    served = [r.id for r in requests if scene.finish_reason(r.id) is FinishReason.LENGTH]
    assert len(served) == 199
    assert scene.finish_reason(Poisoned.POISON) is FinishReason.ATTEMPTS_EXHAUSTED
    assert len([update for update in scene.updates if update.lost]) == 2
    assert companions[0] == 3
    assert companions[-1] == 0  # the second time it was alone


def test_without_a_cap_that_request_takes_workers_until_none_may_be_restarted():
    """The negative control: as many attempts as it likes."""
    scene = Scene(num_ranks=4, num_slots=4, worker=Poisoned, on_worker_loss="restart",
                  resume_lost=True, max_attempts=99)  # fmt: skip
    with pytest.raises(WorkerFailed):
        scene.run(long_requests(200))
    assert len([update for update in scene.updates if update.lost]) == 4 * 4


def test_the_companions_of_such_a_request_are_tried_alone_and_then_done():
    requests = long_requests(8)
    crowd = {}

    def meddle(scene, n):
        for session in scene.engine.sessions:
            for queued in session.request_ids:
                if session._attempts[session._slots[queued]]:
                    crowd[queued] = max(crowd.get(queued, 0), len(session.request_ids))

    scene = Scene(num_ranks=2, num_slots=4, faults={1: [9]}, on_worker_loss="restart",
                  resume_lost=True)  # fmt: skip
    scene.run(requests, meddle)
    check(scene, requests)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}
    assert len(crowd) == 4
    assert set(crowd.values()) == {1}


@pytest.mark.parametrize("resume_lost", [False, True])
def test_what_a_lost_worker_never_took_is_told_to_another(resume_lost):
    """Without `resume_lost`, a request that ran ends; one that was never taken did not run."""
    requests = long_requests(4)

    class Deaf(ScriptedWorker):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.taken = 1 if self.dies_after is not None else None

    scene = Scene(num_slots=2, worker=Deaf, faults={0: [6]}, on_worker_loss="restart",
                  resume_lost=resume_lost)  # fmt: skip
    scene.run(requests)
    check(scene, requests)
    reasons = [scene.finish_reason(request.id) for request in requests]
    first = FinishReason.LENGTH if resume_lost else FinishReason.WORKER_LOST
    assert reasons == [first] + [FinishReason.LENGTH] * 3
