"""What a replica says: the batches of its engine, and why there are no more."""

from collections import deque
from types import SimpleNamespace

import pytest

from jax_specdec.engine import EngineConfig
from jax_specdec.engine.errors import EngineClosed, RequestError, WorkerFailed
from jax_specdec.engine.queued_request import QueuedRequest, ended
from jax_specdec.ray.batch import unpacked
from jax_specdec.ray.replica import Replica
from jax_specdec.ray.replica_types import Submission
from jax_specdec.records.batch import FinishReason
from tests.support.scene import long_requests

REASONS = [FinishReason.WORKER_LOST, FinishReason.ABORT, FinishReason.ATTEMPTS_EXHAUSTED]


def replica(**options):
    return Replica(0, EngineConfig(vocab_size=16, on_worker_loss="restart", **options))


@pytest.mark.parametrize(
    ("resume_lost", "expected"), [(True, [REASONS[1:]]), (False, [REASONS[:1], REASONS])]
)
def test_an_engine_s_last_words_end_no_request_that_the_fleet_resumes(resume_lost, expected):
    """Another replica takes them; a batch that had nothing else is none."""
    ends = [
        ended(QueuedRequest(request=request), reason).batches
        for request, reason in zip(long_requests(3), REASONS, strict=True)
    ]
    steps = deque([ends[0], [*ends[0], *ends[1], *ends[2]], WorkerFailed("no worker is left")])
    made = replica(resume_lost=resume_lost)
    made._send_queue = SimpleNamespace(read=lambda pause: steps)
    *batches, last = made.records(0.0)
    assert last == "no worker is left"
    found = [unpacked(batch).column("finish_reason").to_pylist() for batch in batches]
    assert found == expected


@pytest.mark.parametrize("mistake", [TypeError("a mistake"), ValueError("a mistake")])
def test_an_engine_that_ends_by_a_mistake_raises_it_to_its_reader(mistake):
    made = replica()
    made._send_queue.fail(mistake)
    with pytest.raises(type(mistake), match="a mistake"):
        list(made.records(0.0))


def test_a_request_that_an_engine_refuses_is_no_loss_of_its_replica():
    made, errors = replica(), [RequestError("an id outside the vocabulary"), EngineClosed("closed")]

    def submit(*_, **__):
        raise errors.pop(0)

    submission = Submission(request=long_requests(1)[0])
    with pytest.raises(RequestError):
        made._submit(SimpleNamespace(submit=submit), submission)
    made._submit(SimpleNamespace(submit=submit), submission)
    assert list(made.records(0.0)) == ["closed"]
