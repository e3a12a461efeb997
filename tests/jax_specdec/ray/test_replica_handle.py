"""A replica as the fleet sees it, over a stand-in for Ray: what is a loss, and what a mistake."""

from types import SimpleNamespace
from unittest import mock

import pytest

from jax_specdec.engine.errors import EngineClosed, WorkerFailed
from jax_specdec.ray import errors as errors_module
from jax_specdec.ray import replica_handle as handle_module
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.replica_handle import ReplicaHandle
from jax_specdec.ray.request_table import BatchError
from tests.support.fake_ray import FakeRay

MISTAKES = [TypeError("a mistake"), ValueError("a mistake"), AttributeError("a mistake")]


@pytest.fixture
def ray(monkeypatch):
    made = FakeRay(address=SimpleNamespace(node="n", process="p"))
    for module in (errors_module, handle_module):
        monkeypatch.setattr(module, "ray", made)
    return made


@pytest.fixture
def member(ray):
    """Of a fleet that is over once the member is lost, or the fleet has failed."""
    fleet = mock.Mock(**{"weights.return_value.version": 0})
    fleet.over = lambda: fleet.lost.called or fleet.failed.called
    made = ReplicaHandle(0, ray.place, fleet, RayConfig(coalesce=0.0, backlog=1))
    made._place = ray.place()
    return made


def live(member):
    """Why it was lost, each time, and with what its fleet failed."""
    member.run()
    fleet = member.fleet
    failure = fleet.failed.call_args.args[0] if fleet.failed.called else None
    return [call.args[1] for call in fleet.lost.call_args_list], failure


GONE = {"ActorDiedError", "ActorUnavailableError", *errors_module.NAMES_OF_LOSSES} - {
    "GetTimeoutError"
}


@pytest.mark.parametrize(
    ("call", "error", "is_lost"),
    [
        *(("begin", mistake, False) for mistake in MISTAKES),
        ("begin", "RayTaskError", False),  # what a replica's code raises comes as one
        *(("begin", error("no"), True) for error in (WorkerFailed, EngineClosed, OSError)),
        *(("begin", name, True) for name in sorted(GONE)),
        ("batch", MISTAKES[0], False),
        *(("batch", error, True) for error in (BatchError("it contradicts"), "RayActorError")),
    ],
)
def test_a_replicas_mistake_ends_the_fleet_a_loss_does_not(
    ray, member, call, error, is_lost, caplog
):
    """Where it begins, and where a batch of it is read."""
    error = getattr(ray, error)("it is gone") if isinstance(error, str) else error
    ray.answers |= {"records": ["batch"], call: error}
    assert live(member) == (([str(error)], None) if is_lost else ([], error))
    assert ("the fleet ends: a mistake at replica 0" in caplog.text) != is_lost


def test_a_mistake_on_arrival_is_raised_a_gone_actor_ended(ray, member):
    ray.answers["submit"] = ray.RayActorError("gone")
    for member.ready in (False, True):  # where it is not ready, its loss is known
        member.submit(["a request"])
        member.look()
        assert ray.killed == member.ready
    ray.answers["submit"] = handle_module.NotBegun()  # the reader of its batches finds it lost
    member.submit(["a request"])
    member.look()
    ray.answers["submit"] = MISTAKES[0]
    member.submit(["a request"])
    with pytest.raises(TypeError, match="a mistake"):
        member.look()
    assert ray.killed == 1


def test_calls_that_a_lost_replica_left_do_not_end_the_next_one(ray, member):
    """And one that is gone is ended once, however many calls say so."""
    ray.answers["submit"] = ray.ActorUnavailableError("it restarts")
    for killed in (1, 2):
        member.submit(["a request"])
        assert member.lose("it is lost", coming=True)
        member.ready = True  # it has begun again
        member.look()
        assert ray.killed == killed - 1
        for _ in range(2):
            member.submit(["a request"])
            member.look()
            assert ray.killed == killed


def test_a_call_made_during_a_look_is_looked_at_later(ray, member):
    """As it may, at any moment: while a call is made, and before its outcome is known."""
    waited, calls = [], iter(("first", "second"))

    def wait(sent, num_returns, timeout):
        assert num_returns == len(sent)
        waited.append(list(sent))
        return [], list(sent)

    def call(*_):
        member.look()
        return next(calls)

    ray.wait, member.call = wait, call
    member.submit(["an order"])
    member.submit(["another one"])
    member.look()
    assert waited == [["first"], ["first", "second"]]


CALLS = {
    "status": lambda member: member.status(),
    "load_weights": lambda member: member.load_weights(SimpleNamespace(), None)(),
    "use_weights": lambda member: member.use_weights()(),
    "forget_weights": lambda member: member.forget_weights(),
    "close": lambda member: member.close(reachable=True),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_calls_mistake_is_raised_a_gone_actor_is_not(ray, member, method):
    member.ready = True
    ray.answers[method] = ray.NodeDiedError("gone")
    CALLS[method](member)
    ray.answers[method] = TypeError("a mistake")
    with pytest.raises(TypeError, match="a mistake"):
        CALLS[method](member)


def test_nobody_waits_in_ray_for_a_fleet_that_is_over(ray, member):
    """Who does ends the process, once the program leaves the cluster."""
    left = [3]  # questions until the fleet is over, and what comes is late
    late = ray.GetTimeoutError

    def wait(references, timeout, fetch_local):
        assert timeout > 0
        left[0] -= 1
        return [], references

    def get(reference, timeout):
        left[0] -= 1
        raise late

    ray.wait, ray.get, member.fleet.over = wait, get, lambda: left[0] <= 0
    assert list(member.stream_values(iter(()))) == []
    assert left == [0]
    left[0] = 3
    with pytest.raises(late):
        member.get("a reference")
    assert left == [0]


def test_what_comes_late_is_waited_for(ray, member):
    late = ray.GetTimeoutError()
    ray.answers |= {"a": [late, "first"], "b": [late, late, "second"]}
    assert list(member.stream_values(iter(("a", "b")))) == ["first", "second"]
