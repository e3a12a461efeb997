"""Requests that were lost with a worker: they may be what ends it, so each is tried alone."""

import pytest

from jax_specdec.control import Admit
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.records.batch import FinishReason
from tests.support.scene import Scene, check, long_requests
from tests.support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.fast


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
