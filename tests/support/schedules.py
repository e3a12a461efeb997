"""Schedules of events that an engine is run through."""

import random

from hypothesis import strategies as st

from jax_specdec.records.batch import FinishReason
from tests.support.scene import Scene, check, make_requests


def meddler(seed, *, aborts=0.0, preemptions=0.0, stops=0.0):
    rng = random.Random(seed)

    def meddle(scene, n):
        for name in scene.records:
            if rng.random() < aborts:
                scene.engine.abort(name)
            if rng.random() < preemptions:
                scene.engine.preempt(name)
            if rng.random() < stops:
                scene.engine.preempt(name, reschedule=False)

    return meddle


EVENTS = {
    "seed": st.integers(0, 2**16),
    "count": st.integers(1, 9),
    "ranks": st.integers(1, 3),
    "prefill_ranks": st.integers(0, 2),
    "aborts": st.sampled_from((0.0, 0.0, 0.05)),
    "preemptions": st.sampled_from((0.0, 0.1, 0.3)),
    "stops": st.sampled_from((0.0, 0.0, 0.05)),
    "losses": st.booleans(),
}


def run_through(*, seed, count, ranks, prefill_ranks, aborts, preemptions, stops, losses):
    """Run requests while all of this happens, and check what was delivered."""
    requests = make_requests(count, seed)
    rng = random.Random(seed)
    faults = {}
    if losses:
        for rank in range(ranks + prefill_ranks):
            faults[rank] = [rng.randint(0, 30) for _ in range(rng.randint(0, 3))]
    scene = Scene(
        seed=seed,
        faults=faults,
        num_ranks=ranks,
        num_prefill_ranks=prefill_ranks,
        on_worker_loss="restart",
        resume_lost=rng.random() < 0.7,
        max_attempts=rng.choice((1, 2, 99)),
    )
    scene.run(requests, meddler(seed, aborts=aborts, preemptions=preemptions, stops=stops))
    check(scene, requests)
    assert all(session.num_free == 2 for session in scene.engine.sessions)
    config = scene.engine.config
    if not config.resume_lost or not losses:
        return
    reasons = {scene.finish_reason(request.id) for request in requests}
    assert FinishReason.WORKER_LOST not in reasons
    assert (
        config.max_attempts == 1
        or FinishReason.ATTEMPTS_EXHAUSTED not in reasons
        or any(len(numbers) > 1 for numbers in faults.values())
        or len(faults) > 1
    )
