"""A replica as the fleet sees it, with a stand-in for Ray."""

from types import SimpleNamespace

import pytest

from jax_specdec.ray import member as module
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.member import Member

pytestmark = pytest.mark.fast


class Ray:
    """Notes what it is asked to wait for, and says that nothing is done."""

    ObjectStoreFullError = OutOfDiskError = MemoryError
    GetTimeoutError = TimeoutError

    def __init__(self):
        self.waited = []

    def __call__(self, name="ray"):
        return self

    def wait(self, sent, num_returns, timeout):
        self.waited.append(list(sent))
        assert num_returns == len(sent)
        return [], list(sent)


@pytest.fixture
def ray(monkeypatch):
    made = Ray()
    monkeypatch.setattr(module, "ray", made)
    return made


def member_of(remote):
    """A replica whose actor answers each call with what `remote` returns."""
    bound = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))
    made = Member(0, lambda: None, SimpleNamespace(), RayConfig())
    made._place = SimpleNamespace(actor=SimpleNamespace(submit=bound))
    return made


def test_a_call_that_is_made_while_the_watch_looks_is_looked_at_later(ray):
    calls = iter(("first", "second"))

    def remote(orders):
        member.look()  # as the fleet's watch may, at any moment
        return next(calls)

    member = member_of(remote)
    member.submit(["an order"])
    member.submit(["another one"])
    member.look()
    assert ray.waited == [["first"], ["first", "second"]]


def test_a_full_store_is_said_where_requests_do_not_fit(ray):
    def remote(orders):
        raise ray.ObjectStoreFullError("a tuple of Ray's")

    with pytest.raises(RuntimeError, match=r"store is full.* 2 requests cannot be stored"):
        member_of(remote).submit(["an order", "another one"])


class Waits:
    """Ray, for which nothing ever comes; the fleet is over after a few questions."""

    GetTimeoutError = TimeoutError
    ObjectStoreFullError = OutOfDiskError = MemoryError

    def __init__(self, questions):
        self.left = questions

    def __call__(self, name="ray"):
        return self

    def over(self):
        return self.left <= 0

    def wait(self, references, timeout, fetch_local):
        assert timeout > 0
        self.left -= 1
        return [], references

    def get(self, reference, timeout):
        self.left -= 1
        raise TimeoutError


def test_nobody_waits_in_ray_for_a_fleet_that_is_over(monkeypatch):
    """Who does ends the process, once the program leaves the cluster."""
    ray = Waits(3)
    monkeypatch.setattr(module, "ray", ray)
    member = Member(0, lambda: None, ray, RayConfig())
    assert list(member._each(iter(()))) == []
    assert ray.left == 0
    ray.left = 3
    with pytest.raises(TimeoutError):
        member._get("a reference")
    assert ray.left == 0


def test_what_comes_late_is_waited_for(monkeypatch):
    ray = Waits(10)
    answers = iter((TimeoutError(), "first", TimeoutError(), TimeoutError(), "second"))

    def get(reference, timeout):
        if isinstance(answer := next(answers), TimeoutError):
            raise answer
        return answer

    monkeypatch.setattr(module, "ray", ray)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda references, timeout, fetch_local: (references, []))
    member = Member(0, lambda: None, ray, RayConfig())
    assert list(member._each(iter(("a", "b")))) == ["first", "second"]
