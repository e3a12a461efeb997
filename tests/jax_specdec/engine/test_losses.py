"""Lost workers: how they are reported, what becomes of their requests, and which workers go on."""

import time

import pytest

from ipc.errors import RingTimeout
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
    scene = Scene(faults={0: [4, 2]}, on_worker_loss="restart", resume_lost=True).run(requests)
    check(scene, requests)
    assert len(scene.workers) == 3
    assert [update.process_rank for update in scene.updates if update.lost] == [0, 0]
    (status,) = scene.engine.status
    assert (status.restarts, status.alive) == (2, True)
    assert status.ring.messages == scene.workers[2].sent
    assert status.statistics.num_tokens == 6 * 20  # of all its workers


class Hanging(ScriptedWorker):
    """Sends some messages, and then nothing, without ending."""

    def receive(self, timeout, *, rehearse=None):
        if self.sent >= 5:
            time.sleep(timeout / 100)
            raise RingTimeout
        return super().receive(timeout, rehearse=rehearse)


def test_a_worker_that_hangs_is_lost_where_a_limit_is_set():
    requests = long_requests()
    scene = Scene(on_worker_loss="restart", resume_lost=True, max_silence=0.05, worker=Hanging)
    scene.worker = ScriptedWorker  # in its place
    scene.run(requests)
    check(scene, requests)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}
    (report,) = [update for update in scene.updates if update.lost]
    assert "nothing came for 0.05 seconds" in str(report.lost)
    assert scene.workers[0].stopped
    assert scene.workers[0].sent == 5


def test_restarts_come_to_an_end():
    scene = Scene(faults={0: [0] * 9}, on_worker_loss="restart", max_restarts=2)
    with pytest.raises(WorkerFailed, match="rank 0"):
        scene.run(long_requests())
    assert len(scene.workers) == 3
    with pytest.raises(WorkerFailed):  # no worker is left
        list(scene.engine.generate(long_requests()))


def test_when_everything_stops_every_request_that_began_is_closed():
    requests = long_requests(9)

    def meddle(scene, n):
        if n == 5:
            scene.engine.preempt("r0")

    scene = Scene(num_ranks=2, num_slots=1, num_prefill_ranks=1, faults={1: [9]})
    with pytest.raises(WorkerFailed, match="rank 1"):
        scene.run(requests, meddle)
    began = [name for name, records in scene.records.items() if records]
    assert len(began) > 3  # two in slots, others between the prefill worker and a slot
    for name in began:
        ends = [r.finish_reason for r in scene.records[name] if r.finish_reason]
        assert ends.count(FinishReason.WORKER_LOST) == 1 or ends[-1] is FinishReason.LENGTH
        assert scene.records[name][-1].finish_reason is ends[-1]


def test_without_its_prefill_worker_an_engine_decodes_all_the_same():
    requests = long_requests()
    scene = Scene(num_prefill_ranks=1, faults={1: [2]}, on_worker_loss="continue",
                  resume_lost=True)  # fmt: skip
    scene.run(requests)
    check(scene, requests)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}
