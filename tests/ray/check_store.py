"""An object store smaller than what a run brings: who does not read it, and who keeps it."""

import time

import numpy as np
import pytest

from jax_specdec.engine import EngineConfig, FinishReason
from jax_specdec.ray import ClusterError, RayConfig, RayEngine
from tests.ray import cluster as rig
from tests.support.emitting_worker import TOKENS
from tests.support.processes import wait_for
from tests.support.requests import request

WORKER_LOST = FinishReason.WORKER_LOST
SLOTS, LENGTH, VOCABULARY, K = 256, 4000, 1000, 20
INLINE = 1 << 18  # bytes; smaller objects come within Ray's answers, and lie in no store


cluster = rig.fixture(rig.cluster_that_leaves_nothing, 1, system=rig.NO_DISK)


def fleet(**more):
    config = EngineConfig(
        vocab_size=VOCABULARY, num_slots=SLOTS, max_length=LENGTH + 8, num_drafts=TOKENS, **more
    )
    return RayEngine(config, RayConfig(), make_engine=rig.engine_with(rig.EMITTER))


def requests():
    """Requests whose tokens and top K take twice the store."""
    return [request(f"r{n}", (n,), max_tokens=LENGTH, logprobs=K) for n in range(SLOTS)]


def steps(engine):
    return engine.status[0].steps


def in_store(array):
    """Whether an array lies in memory that this process shares with Ray's object store."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if begin <= array.ctypes.data < end:
                return "plasma" in line
    return False


def test_an_idle_reader_stops_the_worker_not_the_store(cluster):
    with fleet() as engine:
        running = engine.generate(requests())
        next(running)
        seen = [0]

        def stands_still():
            time.sleep(1)
            seen.append(steps(engine))
            return seen[-1] == seen[-2] > 0

        wait_for(stands_still, 120)
        assert steps(engine) < LENGTH // TOKENS // 2
        size, ends = 0, 0
        for batch in running:  # what was read is let go of
            if batch.rows.nbytes > INLINE:
                assert in_store(batch.token_ids)
                assert in_store(batch.rows.column("topk_logprobs").values.values.to_numpy())
                assert not in_store(batch.token_ids.copy())
            size += batch.rows.nbytes
            ends += np.count_nonzero(batch.finish_reasons == FinishReason.LENGTH)
        assert (size > 1.5 * rig.STORE, ends) == (True, SLOTS)
        (status,) = engine.status
        assert (status.losses, status.events) == (0, ())


def test_a_reader_that_keeps_more_than_the_store_holds_is_told(cluster):
    """All requests end with an error that says what to do; what is let go of can be used again."""
    kept = []
    with fleet(on_worker_loss="restart", resume_lost=True) as engine:
        with pytest.raises(ClusterError, match=r"store is full.*a batch of replica 0.*columns\("):
            kept.extend(engine.generate(requests()))
        assert sum(batch.rows.nbytes for batch in kept) < 1.1 * rig.STORE
        parts = [part for batch in kept for part in batch if part.finish_reason is not None]
        ends = {part.request_id: part.finish_reason for part in parts}
        assert ends == dict.fromkeys((request.id for request in requests()), WORKER_LOST)
        with pytest.raises(ClusterError, match="store is full"):
            engine.submit(requests()[0])
    kept.clear()
    with fleet() as engine:
        size = sum(batch.rows.nbytes for batch in engine.generate(requests()))
    assert size > 1.5 * rig.STORE
