"""What a replica's batches say of requests whose engine has no worker left."""

from collections import deque
from types import SimpleNamespace

import pytest

from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.queued_request import QueuedRequest, ended
from jax_specdec.ray.batch import unpacked
from jax_specdec.ray.replica import Replica
from jax_specdec.records.batch import FinishReason
from tests.support.scene import long_requests

pytestmark = pytest.mark.fast
REASONS = (FinishReason.WORKER_LOST, FinishReason.ABORT, FinishReason.ATTEMPTS_EXHAUSTED)


def brought(resume_lost):
    """The requests' reasons in the batches of an engine that ended one for each reason."""
    ends = [
        ended(QueuedRequest(request=request), reason).batches
        for request, reason in zip(long_requests(3), REASONS, strict=True)
    ]
    steps = deque([ends[0], [*ends[0], *ends[1], *ends[2]], WorkerFailed("no worker is left")])
    replica = Replica(
        0, EngineConfig(vocab_size=16, on_worker_loss="restart", resume_lost=resume_lost)
    )
    replica._outbox = SimpleNamespace(read=lambda pause: steps)
    *batches, last = replica.records(0.0)
    assert last == "no worker is left"
    return [unpacked(batch).column("finish_reason").to_pylist() for batch in batches]


def test_an_engine_s_last_words_end_no_request_that_the_fleet_resumes():
    """Another replica takes them; a batch that had nothing else is none."""
    assert brought(True) == [[FinishReason.ABORT, FinishReason.ATTEMPTS_EXHAUSTED]]


def test_where_nothing_is_resumed_they_end():
    """The negative control."""
    assert brought(False) == [[REASONS[0]], list(REASONS)]
