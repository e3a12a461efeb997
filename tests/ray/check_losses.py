"""Replicas over several raylets of this machine; each kind of process is killed in mid-run."""

import os
import signal

import pytest

from jax_specdec.engine import FinishReason
from jax_specdec.engine.errors import RequestError, WorkerFailed
from tests.ray.cluster import (
    add_node,
    check,
    cluster_that_leaves_nothing,
    config,
    crash,
    fleet,
    kill_raylet,
    make_requests,
    pids,
)
from tests.support.processes import is_alive, wait_for


@pytest.fixture(scope="module")
def cluster():
    with cluster_that_leaves_nothing(2, 2) as made:
        yield made


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
    with fleet(3) as engine:
        wait_for(lambda: len(pids(engine)) == 3)
        ours = {pid for found in pids(engine).values() for pid in found}
        requests = make_requests(60, 60)

        def kill_worker():
            os.kill(pids(engine)[0][1], signal.SIGKILL)

        check(requests, run(engine, requests, 300, kill_worker))

        def kill_actor():
            os.kill(pids(engine)[1][0], signal.SIGKILL)

        check(requests, run(engine, requests, 300, kill_actor))
        wait_for(lambda: len(pids(engine)) == 3)

        def crash_node():
            assert crash(cluster.workers[0], engine) > 0
            add_node(cluster, 2)

        check(requests, run(engine, requests, 300, crash_node))
        wait_for(lambda: len(pids(engine)) == 3, 90)
        gone = cluster.workers[0].node_id
        assert gone not in {status.node for status in engine.status}
        check(requests, run(engine, requests, 0, None))
        assert sum(status.losses for status in engine.status) >= 2

        kill_raylet(next(n for n in cluster.workers[1:] if n.node_id in
                         {status.node for status in engine.status}))  # fmt: skip
        check(requests, run(engine, requests, 0, None))
        ours |= {pid for found in pids(engine).values() for pid in found}
    wait_for(lambda: not any(map(is_alive, ours)), 20)


def test_without_restarts_requests_end_with_a_reason(cluster):
    """Those that the lost replica has: 16 while others wait, which they do whenever it is noticed.

    The other replica's worker is stopped until then. What the lost one had made before is read
    first: 4 batches here, 5 in Ray and those with the first 200 tokens, with 16 ends in each at
    most, so that 170 of the requests may end on it.
    """
    settings = config(on_worker_loss="continue", resume_lost=False, heartbeat_timeout=600.0)
    with fleet(2, settings) as engine:
        wait_for(lambda: len(pids(engine)) == 2)
        (actor, _), (_, other) = pids(engine)[0], pids(engine)[1]
        os.kill(other, signal.SIGSTOP)
        requests, batches, reasons = make_requests(240, 20), [], {}
        for batch in engine.generate(requests):
            batches.append(batch)
            if actor and sum(batch.num_tokens for batch in batches) >= 200:
                os.kill(actor, signal.SIGKILL)
                actor = None
            for part in batch:
                if part.finish_reason is not None:
                    reasons[part.request_id] = part.finish_reason
            if other and FinishReason.WORKER_LOST in reasons.values():
                os.kill(other, signal.SIGCONT)
                other = None
        lost = {name for name, reason in reasons.items() if reason is FinishReason.WORKER_LOST}
        assert len(lost) == 16
        whole = [request for request in requests if request.id not in lost]
        kept = [batch.take([n for n, part in enumerate(batch) if part.request_id not in lost])
                for batch in batches]  # fmt: skip
        check(whole, kept)
        assert [status.state for status in engine.status] == ["gone", "ready"]


def test_where_a_loss_stops_all_it_says_why(cluster):
    with fleet(2, config(on_worker_loss="stop")) as engine:
        wait_for(lambda: len(pids(engine)) == 2)
        requests, ends = make_requests(40, 400), {}

        def read():
            for batch in engine.generate(requests):
                for part in batch:
                    if part.finish_reason is not None:
                        ends[part.request_id] = part.finish_reason
                if batch.num_tokens and len(pids(engine)) == 2:
                    os.kill(pids(engine)[1][0], signal.SIGKILL)

        with pytest.raises(WorkerFailed, match="replica 1 is lost"):
            read()
        assert ends.keys() == {request.id for request in requests}
        assert FinishReason.WORKER_LOST in ends.values()
        with pytest.raises(WorkerFailed):
            engine.submit(requests[0])


def test_streams_aborts_and_refusals(cluster):
    with fleet(1) as engine:
        first, second = make_requests(2, 20)
        stream = engine.submit(first)
        with pytest.raises(RequestError, match="that of an open request"):
            engine.submit(first)
        found = [token for part in stream for token in part.token_ids.tolist()]
        assert stream.finish_reason is FinishReason.LENGTH
        assert len(found) == 20
        (endless,) = make_requests(1, 450, first=5)
        stream = engine.submit(endless)
        next(stream)
        assert engine.abort(endless.id)
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
        assert not engine.abort(endless.id)
        check([second], list(engine.generate([second])))
        late = engine.submit(endless, deadline=0.0)
        assert list(late)[-1].finish_reason is FinishReason.DEADLINE


def test_a_replica_that_is_killed_too_often_within_the_window_is_gone(cluster):
    """The other one goes on, and nothing is lost."""
    with fleet(2, config(max_restarts=1)) as engine:
        wait_for(lambda: len(pids(engine)) == 2)
        requests = make_requests(60, 60)

        def kill():
            os.kill(pids(engine)[1][0], signal.SIGKILL)

        check(requests, run(engine, requests, 300, kill))
        wait_for(lambda: len(pids(engine)) == 2)
        check(requests, run(engine, requests, 300, kill))
        wait_for(lambda: [status.state for status in engine.status] == ["ready", "gone"])
        check(requests, run(engine, requests, 0, None))
