"""Rings whose workers never came to them: the name stays, unless somebody tidies up.

`tests.support` has no worker that is so slow. One that only waits for its engine's end stands for
it, and replicas are struck while they begin.
"""

import os
import signal
import sys

import pytest

from ipc.doctor import find_ring_files
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.ray import RayConfig, RayEngine
from tests.ray.cluster import cluster_of, config, engine_with, fixture, make_requests, rings
from tests.support.processes import wait_for

WAITS = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")


cluster = fixture(cluster_of, 1, 1)


def fleet(**more):
    return RayEngine(config(**more), RayConfig(), make_engine=engine_with(WAITS))


def ring_of_another(*known):
    """Wait for a ring that none of these processes made; the process that did."""
    found = set()

    def another():
        found.update({file.creator.pid for file in find_ring_files() if file.state == "alive"})
        return found - {*known, os.getpid()}

    wait_for(another, 60)
    (creator,) = another()
    return creator


def made_by(creator):
    return [file.path for file in find_ring_files() if file.creator.pid == creator]


def test_a_new_replica_removes_rings_of_the_killed_one(cluster):
    before = rings()
    with fleet() as engine:
        killed = ring_of_another()
        assert made_by(killed)
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: engine.status[0].losses)
        ring_of_another(killed)
        assert not made_by(killed)
        assert rings() - before
        # It is closed while it begins, once more.
    wait_for(lambda: rings() <= before)


def test_the_node_of_a_replica_that_is_gone_is_tidied(cluster):
    before = rings()
    with fleet(on_worker_loss="stop") as engine:
        killed = ring_of_another()
        assert made_by(killed)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="replica 0 is lost"):
            list(engine.generate(make_requests(1)))
        wait_for(lambda: rings() <= before, 30)
