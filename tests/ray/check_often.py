"""The short form for CI: a worker, a replica, and then a whole node are lost in mid-run."""

import os
import signal

from tests.ray.cluster import (
    add_node,
    check,
    cluster_of,
    crash,
    fleet,
    make_requests,
    nothing_is_left,
    pids,
    rings,
)
from tests.support.processes import is_alive, wait_for


def test_every_request_is_served_whoever_is_lost():
    before = rings()
    with cluster_of(1, 1) as cluster, fleet(2) as engine:
        wait_for(lambda: len(pids(engine)) == 2)
        requests, tokens, batches = make_requests(100, 60), 0, []
        ours = {pid for found in pids(engine).values() for pid in found}
        gone = []

        def crash_node():
            """End the node of a replica that is there."""
            (node,) = [n for n in cluster.workers if n.node_id == engine.status[0].node]
            gone.append(node.node_id)
            assert crash(node, engine)

        strikes = [
            (200, lambda: os.kill(pids(engine)[0][1], signal.SIGKILL)),
            (1500, lambda: os.kill(pids(engine)[1][0], signal.SIGKILL)),
            (3000, crash_node),
        ]
        for batch in engine.generate(requests):
            batches.append(batch)
            tokens += batch.num_tokens
            if strikes and tokens >= strikes[0][0]:
                strikes.pop(0)[1]()
                if not strikes:
                    add_node(cluster, 1)
        check(requests, batches)
        assert not strikes
        wait_for(lambda: len(pids(engine)) == 2, 90)
        assert engine.status[0].losses + engine.status[1].losses >= 2
        found = pids(engine)
        assert not {status.node for status in engine.status} & {*gone}
        ours |= {pid for each in found.values() for pid in each}
    wait_for(lambda: not any(map(is_alive, ours)), 30)
    wait_for(lambda: nothing_is_left(before), 20)
