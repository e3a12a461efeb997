"""A replica as the fleet sees it, with a stand-in for Ray."""

from types import SimpleNamespace

import pytest

from jax_specdec.ray import member as module
from jax_specdec.ray.member import Member

pytestmark = pytest.mark.fast


class Ray:
    """Notes what it is asked to wait for, and says that nothing is done."""

    ObjectStoreFullError = OutOfDiskError = MemoryError

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
    made = Member(0, lambda: None, SimpleNamespace())
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
