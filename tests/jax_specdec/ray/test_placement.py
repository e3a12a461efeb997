"""Where replicas run: what can be known without a cluster."""

import socket
import sys

import pytest

from jax_specdec.engine import EngineConfig
from jax_specdec.ray import RayConfig, RayEngine, errors, placement


def test_an_address_where_nobody_listens_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        placement.check_reachable(address)
    with pytest.raises(ConnectionError, match=f"no Ray cluster listens at {address}"):
        placement.check_reachable(address)
    for other in ("", "auto", "local", "ray://host:10001"):  # Ray knows what these are
        placement.check_reachable(other)


def test_without_ray_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ray\[default,serve,data\]"):
        RayEngine(EngineConfig(vocab_size=32))
    with pytest.raises(ModuleNotFoundError, match="nothing_of_ours"):
        errors.ray("nothing_of_ours")  # a mistake of ours is no advice


def test_devices_are_what_an_actor_asks_for():
    assert placement.of_actor({"GPU": 4, "TPU": 2}) == {
        "num_cpus": 0, "num_gpus": 4, "resources": {"TPU": 2},
    }  # fmt: skip
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0, "node:10.0.0.1": 1.0, "memory": 1e9}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {}},
    ]
    assert placement.nodes_of(nodes) == "CPU 8, GPU 4; none"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"tensor_parallel": 3, "processes": True}, "tensor_parallel = 3, processes = True"),
        ({"tensor_parallel": 4}, "each must have a process"),
        ({"tensor_parallel": 4, "processes": True, "num_ranks": 2}, "has one worker; raise repli"),
    ],
)
def test_a_model_that_does_not_divide_among_nodes_is_refused(engine, message):
    with pytest.raises(ValueError, match=message):
        RayConfig(nodes=2).check(EngineConfig(vocab_size=32, **engine))
    RayConfig(nodes=2).check(EngineConfig(vocab_size=32, tensor_parallel=4, processes=True))
