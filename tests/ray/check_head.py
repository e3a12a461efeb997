"""A cluster whose head is started again: it knows nothing of its nodes any more."""

import threading

from tests.ray.cluster import check, check_end_of_fleet, cluster_of, fleet, make_requests, pids
from tests.support.processes import wait_for


def test_a_restarted_head_is_an_error_that_says_so():
    with cluster_of(1, 1) as cluster:
        with fleet(2, head_timeout=30.0) as engine:
            wait_for(lambda: len(pids(engine)) == 2)

            def restart():
                cluster.head_node.kill_gcs_server()
                cluster.head_node.start_gcs_server()

            check_end_of_fleet(engine, restart, "the head of the Ray cluster was restarted")
        # One that waits in Ray would end this process when it leaves the cluster.
        assert not [t.name for t in threading.enumerate() if t.name.startswith("replica ")]
    with cluster_of(1), fleet(1) as engine:
        check(requests := make_requests(2), list(engine.generate(requests)))
