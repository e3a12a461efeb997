"""Mistakes in a program end the fleet with themselves; what Ray says is gone is a lost replica."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jax_specdec.engine import EngineConfig
from jax_specdec.engine.errors import EngineClosed, RequestError, WorkerFailed
from jax_specdec.ray import errors as errors_module
from jax_specdec.ray import fleet as fleet_module
from jax_specdec.ray import head as head_module
from jax_specdec.ray import member as member_module
from jax_specdec.ray import overview as overview_module
from jax_specdec.ray.book import BatchError
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.fleet import Fleet
from jax_specdec.ray.member import Member
from jax_specdec.ray.replica import Replica
from tests.support.fake_ray import FakeRay

pytestmark = pytest.mark.fast


class FakeFleet:
    """Notes what a member says; it is over once the member is lost, or the fleet has failed."""

    def __init__(self):
        self.lost_because, self.failure = [], None
        self.bring = lambda rows: None

    def over(self):
        return bool(self.lost_because) or self.failure is not None

    def weights(self):
        return SimpleNamespace(version=0)

    def lost(self, member, why, coming, charged):
        self.lost_because.append(why)

    def failed(self, error):
        self.failure = error

    def joined(self, member, version):
        return True

    def brought(self, member, rows):
        self.bring(rows)


@pytest.fixture
def ray(monkeypatch):
    made = FakeRay(home=SimpleNamespace(node="n", process="p"))
    for module in (errors_module, head_module, member_module, overview_module):
        monkeypatch.setattr(module, "ray", made)
    return made


@pytest.fixture
def member(ray):
    made = Member(0, ray.place, FakeFleet(), RayConfig(coalesce=0.0, backlog=1))
    made._place = ray.place()
    return made


def live(member):
    member._run()
    return member._fleet.lost_because, member._fleet.failure


MISTAKES = (TypeError("a mistake"), ValueError("a mistake"), AttributeError("a mistake"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_beginning_replica_ends_the_fleet(ray, member, mistake, caplog):
    ray.answers["begin"] = mistake
    assert live(member) == ([], mistake)
    assert "the fleet ends: a mistake at replica 0" in caplog.text


@pytest.mark.parametrize(
    "error", [WorkerFailed("no worker"), EngineClosed("closed"), OSError("no room")]
)
def test_what_keeps_an_engine_from_beginning_on_a_node_is_a_loss(ray, member, error):
    ray.answers["begin"] = error
    assert live(member) == ([str(error)], None)


@pytest.mark.parametrize("name", ["ActorDiedError", "ActorUnavailableError", *errors_module._LOST])
def test_what_ray_says_is_gone_is_a_loss(ray, member, name):
    if name == "GetTimeoutError":
        return  # it is waited on
    ray.answers["begin"] = getattr(ray, name)("it is gone")
    assert live(member) == (["it is gone"], None)


def test_what_a_replicas_code_raises_comes_as_an_error_of_rays_and_is_no_loss(ray, member):
    ray.answers["begin"] = mistake = ray.RayTaskError("TypeError: a mistake")
    assert live(member) == ([], mistake)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_while_batches_are_read_ends_the_fleet(ray, member, mistake, monkeypatch):
    monkeypatch.setattr(member_module, "unpacked", lambda data: rows_of(1))
    ray.answers |= {"records": ["batch"], "batch": np.zeros(8, np.uint8)}

    def bring(rows):
        raise mistake

    member._fleet.bring = bring
    assert live(member) == ([], mistake)


@pytest.mark.parametrize("error", [BatchError("it contradicts"), "RayActorError"])
def test_a_batch_that_contradicts_and_an_actor_that_is_gone_are_losses(ray, member, error):
    ray.answers["records"] = ["batch"]
    ray.answers["batch"] = getattr(ray, error)("gone") if isinstance(error, str) else error
    lost, failure = live(member)
    assert (len(lost), failure) == (1, None)


def rows_of(count):
    column = SimpleNamespace(values=range(count))
    return SimpleNamespace(num_rows=count, column=lambda name: column)


def test_a_mistake_where_requests_arrive_is_raised_and_a_gone_actor_is_ended(ray, member):
    member.ready = True
    ray.answers["submit"] = ray.RayActorError("gone")
    member.submit(["a request"])
    member.look()
    assert ray.killed == 1
    ray.answers["submit"] = TypeError("a mistake")
    member.submit(["a request"])
    with pytest.raises(TypeError, match="a mistake"):
        member.look()
    assert ray.killed == 1


CALLS = {
    "status": lambda member: member.status(),
    "load_weights": lambda member: member.load_weights(SimpleNamespace(), None)(),
    "use_weights": lambda member: member.use_weights()(),
    "forget_weights": lambda member: member.forget_weights(),
    "close": lambda member: member.close(reachable=True),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_mistake_in_a_call_is_raised_and_an_actor_that_is_gone_is_not(ray, member, method):
    member.ready = True
    ray.answers[method] = ray.NodeDiedError("gone")
    CALLS[method](member)
    ray.answers[method] = TypeError("a mistake")
    with pytest.raises(TypeError, match="a mistake"):
        CALLS[method](member)


def test_a_member_that_meets_a_mistake_when_it_closes_gives_its_devices_back(ray, member):
    member._home = SimpleNamespace(node="n", process="p")
    ray.answers["close"] = TypeError("a mistake")
    with pytest.raises(TypeError):
        member.close(reachable=True)
    assert ray.called == ["close", "remove", "tidy"]


def test_a_fleet_closes_every_member_whatever_one_of_them_raises():
    closed = []

    def close(number):
        def it(*, reachable):
            closed.append(number)
            if number == 1:
                raise TypeError("a mistake")

        return it

    fleet = SimpleNamespace(members=[SimpleNamespace(close=close(n)) for n in range(3)])
    with pytest.raises(TypeError), fleet_module.contextlib.ExitStack() as left:
        Fleet._close_members(fleet, left, reachable=True)
    assert closed == [0, 1, 2]


def test_a_mistake_in_the_watch_ends_the_fleet_with_itself(caplog):
    mistake, said = TypeError("a mistake"), []

    def look():
        raise mistake

    fleet = SimpleNamespace(_look=look, over=lambda: False, fail=said.append)
    Fleet._watch_all(fleet)
    assert said == [mistake]
    assert "a mistake in its watch" in caplog.text


def replica():
    return Replica(0, EngineConfig(vocab_size=16, on_worker_loss="restart"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_engine_that_ends_by_a_mistake_raises_it_to_its_reader(mistake):
    made = replica()
    made._outbox.fail(mistake)
    with pytest.raises(type(mistake), match="a mistake"):
        list(made.records(0.0))
    made = replica()
    made._outbox.fail(WorkerFailed("no worker is left"))
    assert list(made.records(0.0)) == ["no worker is left"]


def test_a_request_that_an_engine_refuses_is_no_loss_of_its_replica():
    made = replica()
    order = SimpleNamespace(
        request=SimpleNamespace(id="a"), progress=None, priority=0, deadline=None
    )

    def submit(*_, **__):
        raise submit.error

    engine = SimpleNamespace(submit=submit)
    submit.error = RequestError("an id outside the vocabulary")
    with pytest.raises(RequestError):
        made._submit(engine, order)
    submit.error = EngineClosed("closed")
    made._submit(engine, order)
    assert list(made.records(0.0)) == ["closed"]


def test_an_actor_whose_name_is_gone_or_that_does_not_answer_is_said(ray):
    ray.get_actor = lambda name, namespace: ray.place().actor
    ray.answers["status"] = ray.GetTimeoutError()
    assert overview_module._replica("a") == "does not answer (GetTimeoutError)"
    ray.answers["status"] = TypeError("a mistake")
    with pytest.raises(TypeError):
        overview_module._replica("a")

    def gone(name, namespace):
        raise ValueError(f"Failed to look up actor with name '{name}'")

    ray.get_actor = gone
    assert overview_module._replica("a") == "has ended"


def test_a_mistake_is_no_silence_of_the_head(ray, monkeypatch):
    monkeypatch.setattr(
        head_module.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None)
    )
    ray.get_runtime_context = lambda: SimpleNamespace(gcs_address="a:1")
    ray.GcsClient = lambda address: SimpleNamespace(check_alive=check)

    def check(nodes, timeout):
        raise check.error

    head = head_module.Head(0.0)
    check.error = ray.RpcError("Deadline Exceeded")
    assert not head._answer()
    check.error = TypeError("a mistake")
    with pytest.raises(TypeError):
        head._answer()


WARN = """
import logging, sys
from jax_specdec.ray import fleet
if sys.argv[1] == "silent":
    fleet.logger.addHandler(logging.NullHandler())
fleet.logger.warning("replica 1 is lost: it was killed")
"""


@pytest.mark.parametrize(
    ("how", "printed"), [("", "replica 1 is lost: it was killed"), ("silent", "")]
)
def test_a_warning_reaches_the_terminal_of_a_program_without_a_log(how, printed):
    done = subprocess.run(
        [sys.executable, "-c", WARN, how], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == printed
    assert not logging.getLogger("jax_specdec.ray").handlers
