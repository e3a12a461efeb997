"""Replicas over several raylets of this machine; each kind of process is killed in mid-run."""

import os
import signal

import pytest

from jax_specdec.engine import FinishReason
from jax_specdec.engine.errors import RequestError
from tests.ray import cluster as rig
from tests.support.processes import is_alive, wait_for

cluster = rig.fixture(rig.cluster_that_leaves_nothing, 2, 2)


def run(engine, requests, at, strike):
    """Run requests, and call `strike` once `at` tokens have come; the batches."""
    batches, tokens = [], 0
    for batch in engine.generate(requests):
        batches.append(batch)
        tokens += batch.num_tokens
        if strike is not None and tokens >= at:
            strike()
            strike = None
    assert strike is None or at == 0
    return batches


def test_every_process_may_be_killed(cluster):
    """A worker, a replica's actor, a raylet; then a node joins, and replicas move to it."""
    with rig.fleet(3) as engine:
        wait_for(lambda: len(rig.pids(engine)) == 3)
        ours = {pid for found in rig.pids(engine).values() for pid in found}
        requests = rig.make_requests(60, 60)

        for replica, place in ((0, 1), (1, 0)):  # a worker, an actor

            def kill(replica=replica, place=place):
                os.kill(rig.pids(engine)[replica][place], signal.SIGKILL)

            rig.check(requests, run(engine, requests, 300, kill))
        wait_for(lambda: len(rig.pids(engine)) == 3)

        def crash_node():
            assert rig.crash(cluster.workers[0], engine) > 0
            rig.add_node(cluster, 2)

        rig.check(requests, run(engine, requests, 300, crash_node))
        wait_for(lambda: len(rig.pids(engine)) == 3, 90)
        gone = cluster.workers[0].node_id
        assert gone not in {status.node for status in engine.status}
        rig.check(requests, run(engine, requests, 0, None))
        assert sum(status.losses for status in engine.status) >= 2

        rig.kill_raylet(next(n for n in cluster.workers[1:] if n.node_id in
                         {status.node for status in engine.status}))  # fmt: skip
        rig.check(requests, run(engine, requests, 0, None))
        ours |= {pid for found in rig.pids(engine).values() for pid in found}
    wait_for(lambda: not any(map(is_alive, ours)), 20)


def test_streams_aborts_and_refusals(cluster):
    with rig.fleet(1) as engine:
        first, second = rig.make_requests(2, 20)
        stream = engine.submit(first)
        with pytest.raises(RequestError, match="that of an open request"):
            engine.submit(first)
        found = [token for part in stream for token in part.token_ids.tolist()]
        assert stream.finish_reason is FinishReason.LENGTH
        assert len(found) == 20
        (endless,) = rig.make_requests(1, 450, first=5)
        stream = engine.submit(endless)
        next(stream)
        assert engine.abort(endless.id)
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
        assert not engine.abort(endless.id)
        rig.check([second], list(engine.generate([second])))
        late = engine.submit(endless, deadline=0.0)
        assert list(late)[-1].finish_reason is FinishReason.DEADLINE
