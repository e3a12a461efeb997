"""A rehearsed message leaves nothing behind: the engine delivers the same with and without."""

import pytest

from jax_specdec.records import output_processor
from tests.support.scene import Scene, long_requests

pytestmark = pytest.mark.fast


def meddle(scene, n):
    names = scene.engine.running
    if names and n == 3:
        scene.engine.abort(names[0])
    elif names and n in (5, 9):
        scene.engine.preempt(names[-1])


def run(rehearse, seed=0):
    scene = Scene(seed=seed, rehearse=rehearse, faults={0: [9]}, on_worker_loss="restart",
                  resume_lost=True)  # fmt: skip
    scene.run(long_requests(), meddle)
    delivered = [
        (record.request_id, record.step, record.token_ids.tolist(), record.cumulative_logprob,
         record.finish_reason, record.reschedule)
        for update in scene.updates
        for record in update.records
    ]  # fmt: skip
    (status,) = scene.engine.status
    return delivered, status.statistics, status.processor


@pytest.mark.parametrize("seed", [0, 1])  # without draft messages, and with them
def test_rehearsals_change_nothing_that_is_delivered(monkeypatch, seed):
    taken = []
    step = output_processor.step

    def noted(state, message):
        taken.append(message)
        return step(state, message)

    monkeypatch.setattr(output_processor, "step", noted)
    plain, messages = run(False, seed), len(taken)
    taken.clear()
    assert run(True, seed) == plain
    assert len(taken) > messages * 1.7  # nearly all of them twice


def test_no_message_and_no_request_is_kept_once_all_have_ended():
    scene = Scene(rehearse=True)
    kept = []

    def look(scene, n):
        (session,) = scene.engine.sessions
        kept.append((bool(session.request_ids), session._last is not None))

    scene.run(long_requests(), look)
    assert (True, True) in kept
    assert kept[-1] == (False, False)
