"""Several raylets on this machine, and fleets over scripted workers on them."""

import collections
import contextlib
import functools
import os
import signal
from pathlib import Path

import pytest

from ipc.doctor import find_ring_files
from jax_specdec.engine import Engine, EngineConfig
from jax_specdec.engine.worker_client import WorkerProcess
from jax_specdec.ray import ClusterError, RayConfig, RayEngine
from tests.support import emitting_worker
from tests.support.delivered_batches import check as check
from tests.support.paths import ROOT
from tests.support.processes import children_of, wait_for
from tests.support.requests import request
from tests.support.scripted_process import WORKER
from tests.support.scripted_worker import VOCAB

STORE = 100_000_000  # bytes of each node's object store
SOON = {  # a dead node is found in seconds
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,  # a node of a busy machine answers late
    "health_check_failure_threshold": 4,
}

NO_DISK = {"local_fs_capacity_threshold": 0.0}  # behind the stores: what does not fit is refused
NODE = {"object_store_memory": STORE, "include_dashboard": False, "include_log_monitor": False}

EMITTER = (*WORKER[:-1], emitting_worker.__name__)


def engine_with(program):
    """What makes an engine whose workers run this program."""
    return functools.partial(Engine, start_worker=functools.partial(WorkerProcess, program=program))


make_engine = engine_with(WORKER)


@contextlib.contextmanager
def cluster_of(*nodes, head=0, system=None):
    """A cluster whose nodes have so many CPUs, the head too, and this program in it.

    Args:
      system: further settings of Ray's own.
    """
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray
    from ray.cluster_utils import Cluster

    settings = {"_system_config": SOON | (system or {}), "no_monitor": True, **NODE}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, **settings})
    try:
        cluster.workers = [cluster.add_node(num_cpus=cpus, **NODE) for cpus in nodes]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def cluster_that_compiles(*nodes):
    """`cluster_of`, whose processes compile cheaply, on the CPU."""
    from tests.support import quick_compile  # brings jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", quick_compile.FLAGS)
        patch.setenv("JAX_PLATFORMS", "cpu")
        with cluster_of(*nodes) as made:
            yield made


@contextlib.contextmanager
def cluster_that_leaves_nothing(*nodes, **options):
    """`cluster_of`, at whose end no ring is in shared memory beside those that were there."""
    before = rings()
    with cluster_of(*nodes, **options) as made:
        yield made
    wait_for(lambda: rings() <= before, 20)


def fixture(make, *nodes, **options):
    """The fixture of a module whose tests share the cluster that `make` makes."""

    @pytest.fixture(scope="module")
    def cluster():
        with make(*nodes, **options) as made:
            yield made

    return cluster


def add_node(cluster, cpus):
    cluster.workers.append(cluster.add_node(num_cpus=cpus, **NODE))


def kill_raylet(node):
    """SIGKILL the raylet of a node; its actors end by themselves."""
    (info,) = node.all_processes["raylet"]
    os.kill(info.process.pid, signal.SIGKILL)
    info.process.wait()  # its actors look whether it is there; a zombie is
    return info.process.pid


def crash(node, engine):
    """End all of a node at once, as a loss of power does; how many replicas it had."""
    victims = [s for s in engine.status if s.node == node.node_id]
    for status in victims:
        for process in (status, *status.workers):
            os.kill(process.pid, signal.SIGKILL)
    kill_raylet(node)
    return len(victims)


def config(**more):
    options = {"num_slots": 8, "on_worker_loss": "restart", "resume_lost": True,
               "max_attempts": 50, "max_restarts": 50, "restart_delay": 0.05}  # fmt: skip
    return EngineConfig(**{"vocab_size": VOCAB, **options, **more})


def fleet(replicas, **more):
    cluster = RayConfig(replicas=replicas, coalesce=0.005, **more)
    return RayEngine(config(), cluster, make_engine=make_engine)


def make_requests(count, tokens=40, first=0):
    return [
        request(f"r{n}", (n % VOCAB, n // VOCAB % VOCAB, 3), max_tokens=tokens,
                logprobs=n % 3 or None, prompt_logprobs=None if n % 4 else n % 3)
        for n in range(first, first + count)
    ]  # fmt: skip


def pids(engine):
    """The processes of each ready replica: the actor's, and its workers'."""
    return {s.replica: (s.pid, *(w.pid for w in s.workers)) for s in engine.status if s.pid}


def below(cluster, word):
    """(node, actor, process) of each process below an actor whose command has this word."""
    found = []
    for node in (cluster.head_node, *cluster.workers):
        for raylet in node.all_processes["raylet"]:
            for actor in children_of(raylet.process.pid):
                for pid in children_of(actor):
                    if word in Path(f"/proc/{pid}/cmdline").read_text():
                        found.append((node, actor, pid))
    return found


def rings():
    return {file.path for file in find_ring_files()}


def check_end_of_fleet(engine, strike, says):
    """`strike()` ends the fleet in mid-run: by an error that says why, and another for new work."""
    slow = engine.generate(make_requests(200, 400))
    next(slow)
    strike()
    with pytest.raises(ClusterError, match=says):
        collections.deque(slow, maxlen=0)
    with pytest.raises(ClusterError, match="start a new RayEngine"):
        engine.submit(make_requests(1)[0])
