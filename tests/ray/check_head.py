"""A cluster whose head is started anew: it knows nothing of its nodes any more."""

from tests.ray.cluster import check_end_of_fleet, cluster_of, fleet, pids
from tests.support.processes import wait_for


def test_a_restarted_head_is_an_error_that_says_so():
    with cluster_of(1, 1) as cluster, fleet(2, head_timeout=30.0) as engine:
        wait_for(lambda: len(pids(engine)) == 2)

        def restart():
            cluster.head_node.kill_gcs_server()
            cluster.head_node.start_gcs_server()

        check_end_of_fleet(engine, restart, "the head of the Ray cluster was restarted")
