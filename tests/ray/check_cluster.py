"""What happens to a fleet beside lost replicas: new weights, no room, a lost head."""

import os
import signal

import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_specdec.engine.errors import WeightsError
from jax_specdec.ray import ClusterError, RayConfig, RayEngine
from tests.ray import cluster as rig
from tests.support.processes import wait_for

cluster = rig.fixture(rig.cluster_that_leaves_nothing, 1, 1, head=1, system=rig.NO_DISK)


def versions(batches):
    return {int(v) for batch in batches for part in batch for v in part.weights_versions}


def test_all_replicas_get_new_weights_or_none(cluster, tmp_path):
    path = tmp_path / "new.safetensors"
    save_file({"x": np.zeros(4, np.float32)}, path)
    with rig.fleet(3) as engine:
        wait_for(lambda: len(rig.pids(engine)) == 3)
        # While nobody reads, 8 batches at most come, of 16 requests each, which is what a replica
        # holds: however long the weights take, most of these requests have not even been sent.
        requests = rig.make_requests(240, 20)
        running = engine.generate(requests)
        batches = [next(running)]
        assert engine.update_weights(path) == 1
        assert engine.num_waiting >= 240 - 8 * 16 - 3 * 16
        batches += list(running)
        rig.check(requests, batches)
        assert versions(batches) == {0, 1}
        later = list(engine.generate(rig.make_requests(10, 5)))
        assert versions(later) == {1}

        with pytest.raises(WeightsError, match="replica 0: the weights cannot be read"):
            engine.update_weights(tmp_path / "missing.safetensors")
        assert {worker.weights_version for s in engine.status for worker in s.workers} == {1}
        assert engine.weights_version == 1

        # A replica that Ray starts again begins with the weights in use.
        os.kill(rig.pids(engine)[1][0], signal.SIGKILL)
        wait_for(lambda: engine.status[1].losses and len(rig.pids(engine)) == 3)
        batches = list(engine.generate(rig.make_requests(48, 10)))
        assert versions(batches) == {1}
        assert {batch.replica for batch in batches} == {0, 1, 2}


def test_weights_that_the_object_store_cannot_hold_are_refused(cluster):
    with rig.fleet(1) as engine:
        rig.check(requests := rig.make_requests(2), list(engine.generate(requests)))
        with pytest.raises(ClusterError, match=r"object store is full.*150000000 bytes"):
            engine.update_weights({"x": np.ones(37_500_000, np.float32)})
        assert engine.weights_version == 0
        rig.check(requests, list(engine.generate(requests)))


def test_a_fleet_without_room_says_what_there_is(cluster):
    small = RayConfig(devices={"CPU": 64}, start_timeout=2)
    with (
        RayEngine(rig.config(), small, make_engine=rig.make_engine) as engine,
        pytest.raises(ClusterError, match=r"CPU': 64.*the nodes have CPU 1"),
    ):
        list(engine.generate(rig.make_requests(1)))


def test_a_lost_head_is_an_error_that_says_so(cluster):
    with rig.fleet(2, head_timeout=3.0) as engine:
        wait_for(lambda: len(rig.pids(engine)) == 2)
        lose = cluster.head_node.kill_gcs_server
        rig.check_end_of_fleet(engine, lose, "the head of the Ray cluster has not answered")
