"""Requests that were lost with a worker: one of them may be what ends it, and each is tried."""

from dataclasses import replace

import pytest

from jax_specdec.control import Admit
from jax_specdec.engine.trials import APART_SECONDS
from jax_specdec.records.batch import FinishReason
from tests.support.scene import Scene, long_requests
from tests.support.scripted_worker import ScriptedWorker
from tests.support.streaming import StreamingScene


def poisoned(*names, dies_in=2):
    """A kind of worker that dies some messages after it was given one of the named requests."""

    class Poisoned(ScriptedWorker):
        def advance(self):
            super().advance()
            if self.dies_after is None and set(names) & {*admitted(self)}:
                self.dies_after = self.sent + dies_in

    return Poisoned


class Plain(ScriptedWorker):
    """Emits a token a step."""

    def propose(self, slot):
        return []


RESTART = {"on_worker_loss": "restart", "resume_lost": True}


def admitted(worker):
    """The ids of the requests that a worker was given, in order."""
    return [one.request.id for one in worker.told(Admit)]


def longer(request, max_tokens):
    return replace(request, params=replace(request.params, max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("count", "names", "options", "losses"),
    [
        # One of 200 on 4 ranks, the first and the last of 32, several of 40.
        (200, ("r77",), {"num_ranks": 4, "num_slots": 4}, 2),
        (32, ("r0",), {"num_slots": 32}, 2),
        (32, ("r31",), {"num_slots": 32}, 2),
        (40, ("r0", "r1"), {"num_slots": 8}, 3),
        (40, tuple(map("r{}".format, range(8))), {"num_slots": 8}, 9),
    ],
)
def test_requests_that_end_workers_take_no_other_with_them(count, names, options, losses):
    """Each is found, and none of the losses that are put down to it counts against the worker."""
    requests = long_requests(count)
    scene = Scene(worker=poisoned(*names), **RESTART, **options).run(requests)
    for request in requests:
        bad = request.id in names
        expected = FinishReason.ATTEMPTS_EXHAUSTED if bad else FinishReason.LENGTH
        assert scene.finish_reason(request.id) is expected
    assert len([update for update in scene.updates if update.lost]) == losses
    assert not any(map(len, scene.engine_workers.restarts))


def test_requests_of_a_lost_worker_are_tried_apart():
    """A worker that was killed by nobody's request: 8 requests, 8 tries of a few steps each."""
    requests = [longer(one, 50) for one in long_requests(9)]
    scene = Scene(num_slots=8, worker=Plain, faults={0: [3]}, **RESTART)
    tries, steps = [], []

    def meddle(scene, n):
        given = admitted(scene.workers[1]) if len(scene.workers) == 2 else []
        if new := given[sum(map(len, tries)) :]:
            tries.append(new)
            steps.append(scene.workers[1].sent)

    scene.run(requests, meddle)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}
    # The newest first; those before run on, and so the last one of all gets its slot last.
    assert tries == [["r7"], ["r6"], ["r5"], ["r4"], ["r3"], ["r2"], ["r1"], ["r0"], ["r8"]]
    assert steps[4] < 4 * 12  # tries end after some steps, not with their requests of 50
    assert len(scene.workers) == 2


@pytest.mark.parametrize(
    ("deaths", "end"),
    [([12, 12, 12], FinishReason.LENGTH), ([12, 3, 12], FinishReason.ATTEMPTS_EXHAUSTED)],
)
def test_a_request_that_gets_on_is_not_what_ends_its_workers(deaths, end):
    """A long request survives any number of losses that are far enough apart."""
    request = longer(*long_requests(1), 60)
    scene = Scene(num_slots=1, worker=Plain, faults={0: deaths}, **RESTART).run([request])
    assert scene.finish_reason("r0") is end
    assert len(scene.workers) == (4 if end is FinishReason.LENGTH else 2)


def test_new_requests_do_not_wait_for_a_try_for_long():
    """One whose prompt takes minutes: after APART_SECONDS others run beside it."""

    class Slow(ScriptedWorker):
        def apply(self, command):
            super().apply(command)
            if isinstance(command, Admit) and command.request.id == "r0":
                self.slots[command.slot].wait = 1000

    scene = StreamingScene(worker=Slow, num_slots=2, faults={0: [3]}, **RESTART)
    first, second = long_requests(2)
    scene.submit(first)
    while len(scene.workers) < 2 or not scene.engine.running:
        scene.round()
    scene.submit(second)
    began = scene.clock.time
    for _ in range(100):
        scene.round()
        assert "r1" not in scene.engine.running
    scene.clock.time = began + APART_SECONDS
    scene.round(2)
    assert scene.engine.running == ("r0", "r1")
    scene.finish()
    assert {stream.finish_reason for stream in scene.streams.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize(("num_slots", "others"), [(8, 1), (16, 20)])
def test_where_lost_workers_are_not_replaced_as_few_are_lost(num_slots, others):
    """Two workers are lost by a poisoned request, never more; rank 2 has 8 long ones.

    Where the others are long too, the next try waits until those of its worker have got on.
    """
    lengths = [20 if n % 3 == 2 else others for n in range(24)]
    requests = list(map(longer, long_requests(24), lengths))
    scene = Scene(num_ranks=3, num_slots=num_slots, worker=poisoned("r23", dies_in=4),
                  on_worker_loss="continue", resume_lost=True)  # fmt: skip
    scene.run(requests)
    ends = [scene.finish_reason(request.id) for request in requests]
    assert ends == [FinishReason.LENGTH] * 23 + [FinishReason.ATTEMPTS_EXHAUSTED]
    assert len([update for update in scene.updates if update.lost]) == 2


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
    reasons = [scene.finish_reason(request.id) for request in requests]
    first = FinishReason.LENGTH if resume_lost else FinishReason.WORKER_LOST
    assert reasons == [first] + [FinishReason.LENGTH] * 3
