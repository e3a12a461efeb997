"""Whether the head is noticed that does not answer, or is another one; with a stand-in for Ray."""

from types import SimpleNamespace

import pytest

from jax_specdec.ray import head as module
from jax_specdec.ray.head import HeadWatch
from tests.support.fake_ray import FakeRay, RayError


class Ray(FakeRay):
    """A cluster whose head answers, until it does not; it counts who asks Ray itself."""

    error, asked = None, 0

    def GcsClient(self, address):
        assert address == "a:1"
        return self

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="a:1")

    def check_alive(self, nodes, timeout):
        assert (nodes, timeout > 0) == ([], True)
        if self.error is not None:
            raise self.error

    def nodes(self):
        self.asked += 1
        return [{"NodeID": "n"}]


@pytest.fixture
def ray(monkeypatch):
    made = Ray()
    monkeypatch.setattr(module, "ray", made)
    # No thread: who tests asks.
    monkeypatch.setattr(module.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    return made


def test_a_head_without_its_state_is_a_problem_at_once(ray):
    """`ray.nodes()` would end the process there."""
    head = HeadWatch(60.0)
    assert (head.nodes(), head.answers, ray.asked) == ([{"NodeID": "n"}], True, 1)
    ray.error = RayError("RPC error: WrongClusterID: Perhaps the client is accessing GCS")
    with pytest.raises(ConnectionError, match="was restarted"):
        head.nodes()
    assert (head.answers, ray.asked) == (False, 1)
    ray.error = None
    assert "does not know this node any more" in head.problem()


def test_a_silent_head_is_a_problem_after_its_time(ray):
    patient, strict = HeadWatch(60.0), HeadWatch(0.0)
    ray.error = RayError("Timed out while waiting for GCS to become available.")
    with pytest.raises(ConnectionError, match="does not answer"):
        patient.nodes()
    assert patient.answers
    assert "has not answered for 0 seconds" in strict.problem()
    ray.error = TypeError("a mistake")
    with pytest.raises(TypeError):
        patient.nodes()
