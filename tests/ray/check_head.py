"""A cluster whose head is started anew: it knows nothing of its nodes any more."""

import pytest

from jax_specdec.ray import ClusterError
from tests.ray.cluster import cluster_of, fleet, make_requests, pids
from tests.support.processes import wait_for


def test_a_restarted_head_is_an_error_that_says_so():
    with cluster_of(1, 1) as cluster, fleet(2, head_timeout=30.0) as engine:
        wait_for(lambda: len(pids(engine)) == 2)
        slow = engine.generate(make_requests(200, 400))
        next(slow)
        cluster.head_node.kill_gcs_server()
        cluster.head_node.start_gcs_server()

        def drain():
            for _ in slow:
                pass

        with pytest.raises(ClusterError, match="the head of the Ray cluster was restarted"):
            drain()
        with pytest.raises(ClusterError, match="start a new RayEngine"):
            engine.submit(make_requests(1)[0])
