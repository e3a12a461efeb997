"""A fleet with stand-ins for Ray and for the replicas: how it counts losses, and how it ends."""

from unittest import mock

import pytest

from jax_specdec.engine import EngineConfig, FinishReason
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.result_queue import ResultQueue
from jax_specdec.engine.stream import Stream
from jax_specdec.ray import fleet as module
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.request_table import Entry
from tests.support.scene import long_requests


def replica(number, place, calls, cluster):
    """A member that takes what it gets, and does nothing."""
    return mock.Mock(number=number, ready=True, begun=True, coming=True)


def head(timeout):
    return mock.Mock(answers=False, **{"problem.return_value": ""})


@pytest.fixture
def fleet_of(monkeypatch):
    monkeypatch.setattr(module.placement, "join_cluster", lambda address: False)
    monkeypatch.setattr(module, "ReplicaHandle", replica)
    monkeypatch.setattr(module, "HeadWatch", head)
    made = []

    def make(replicas, **config):
        settings = EngineConfig(
            vocab_size=32, num_slots=2, on_worker_loss="restart", resume_lost=True, **config
        )
        made.append(module.Fleet(settings, RayConfig(replicas=replicas), None))
        for member in made[-1].members:
            made[-1].joined(member, 0)
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


def lose(fleet, number, *, charged=True):
    member = fleet.members[number]
    member.coming = True
    fleet.lost(member, "it was killed", True, charged)
    if member.coming:
        fleet.joined(member, 0)
    return member.coming


def test_a_replica_is_replaced_so_many_times_within_the_window(fleet_of, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    fleet = fleet_of(2, max_restarts=2, restart_window=100.0)
    for _ in range(9):
        assert lose(fleet, 0)
        now[0] += 60
    assert lose(fleet, 0)
    assert not lose(fleet, 0)
    assert lose(fleet, 1)  # each has its own count
    assert lose(fleet, 1, charged=False)
    assert lose(fleet, 1, charged=False)
    fleet.check_open()
    lose(fleet, 1)
    fleet.members[0].coming = False
    assert not lose(fleet, 1)
    with pytest.raises(WorkerFailed):
        fleet.check_open()


def test_a_fleets_end_reaches_readers_with_their_requests(fleet_of):
    fleet, requests, mistake = fleet_of(1), long_requests(5), TypeError("a mistake")
    queues = [ResultQueue(2, 4), ResultQueue(2, 4)]
    stream = Stream(requests[4], lambda *_: None, max_backlog=4)
    for request, reader in zip(requests, (*queues, *queues, stream), strict=True):
        fleet.admit([Entry(request, reader)])
    fleet.fail(mistake)
    for queue, names in zip(queues, (["r0", "r2"], ["r1", "r3"]), strict=True):
        batch = next(queue)
        assert [request.id for request in batch.requests] == names
        assert batch.finish_reasons.tolist() == [FinishReason.WORKER_LOST] * 2
        with pytest.raises(TypeError):
            next(queue)
    assert next(stream).finish_reason is FinishReason.WORKER_LOST
    with pytest.raises(TypeError):
        next(stream)


def test_a_loss_that_is_put_down_to_a_request_does_not_count(fleet_of):
    fleet = fleet_of(1, max_restarts=2)
    for request in long_requests(9):
        reader = mock.Mock()
        fleet.admit([Entry(request, reader)])
        assert lose(fleet, 0)
        assert lose(fleet, 0)
        (part,) = reader.put.call_args.args
        assert part.finish_reason is FinishReason.ATTEMPTS_EXHAUSTED
    assert len(fleet._restarts[0]) == 0
