"""The engine over scripted workers: abort, preemption, hand-over and lost workers, at any moment.

Whatever happens between two updates, every request's tokens, logprobs, cumulative logprob and
statistics must be those of an undisturbed run, or a beginning of it with the reason why it ended.
"""

import functools
import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jax_specdec.control import Admit, Evict
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.records.batch import FinishReason
from tests.support.pages import python_blocks
from tests.support.paths import ROOT
from tests.support.scene import Scene, long_requests, make_requests
from tests.support.scripted_worker import continuation


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
    faults = {
        rank: [rng.randint(0, 30) for _ in range(rng.randint(0, 3))]
        for rank in range(ranks + prefill_ranks if losses else 0)
    }
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
    assert all(session.num_free == 2 for session in scene.engine.sessions)
    config = scene.engine.config
    if not config.resume_lost or not losses:
        return
    reasons = {scene.finish_reason(request.id) for request in requests}
    assert FinishReason.WORKER_LOST not in reasons
    if config.max_attempts > 1 and len(faults) == 1 and len(faults[0]) < 2:
        assert FinishReason.ATTEMPTS_EXHAUSTED not in reasons


# All slots of a worker are released after it left out a draft message.
LEFT_OUT = {"seed": 1283, "count": 3, "ranks": 1, "prefill_ranks": 2, "aborts": 0.05,
            "preemptions": 0.0, "stops": 0.0, "losses": False}  # fmt: skip


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_whatever_happens_nothing_is_lost_or_doubled(examples):
    checked = settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    checked(example(**LEFT_OUT)(given(**EVENTS)(run_through)))()


def test_a_preempted_request_comes_before_those_that_wait():
    requests, asked = long_requests(4), []

    def meddle(scene, n):
        if not asked and scene.records["r0"]:
            asked.append(scene.engine.preempt("r0"))

    scene = Scene(num_slots=1).run(requests, meddle)
    order = [command.request.id for command in scene.workers[0].told(Admit)]
    assert asked == [True]
    assert order == ["r0", "r0", "r1", "r2", "r3"]


def test_a_recovery_stop_ends_a_request_with_an_error():
    requests = make_requests(3, seed=9)
    scene = Scene().run(requests, lambda scene, n: scene.engine.preempt("r0", reschedule=False))
    assert scene.finish_reason("r0") is FinishReason.RECOVERY_ERROR
    assert scene.engine.status[0].processor.preempted == 0


@pytest.mark.parametrize("when", [0, 3])
def test_an_abort_ends_a_request_that_runs_or_waits(when):
    requests, answers = long_requests(4), []

    def meddle(scene, n):
        if n == when:
            answers.extend(map(scene.engine.abort, ("r0", "r3", "r0", "unknown")))

    scene = Scene(num_slots=2).run(requests, meddle)
    assert answers == [True, True, True, False]  # r0 has not ended before the next round
    for name in ("r0", "r3"):
        assert scene.finish_reason(name) is FinishReason.ABORT
    assert scene.tokens("r3") == []
    assert scene.records["r3"][0].cumulative_logprob == 0.0
    assert scene.finish_reason("r1") is FinishReason.LENGTH


def test_abort_and_preempt_leave_what_has_ended_alone():
    scene = Scene()
    for _ in range(2):
        assert not scene.engine.abort("r0")
        assert not scene.engine.preempt("r0")
        if not scene.updates:
            scene.run(make_requests(2))
    assert not scene.workers[0].told(Evict)


def test_one_worker_prefills_and_others_decode():
    requests = make_requests(8, seed=2)
    scene = Scene(num_ranks=2, num_prefill_ranks=1).run(requests)
    decode, prefill = scene.workers[:2], scene.workers[2]
    assert not any(worker.prefill_only for worker in decode)
    assert prefill.prefill_only
    assert len(prefill.told(Admit)) == 8
    for request in requests:
        first, *others = [r for r in scene.records[request.id] if r.prompt is None]
        tokens, _ = continuation(request)
        assert first.token_ids.tolist() == tokens[:1]
        assert (first.finish_reason is None) == (len(tokens) > 1)
        assert others or len(tokens) == 1  # a stop, or max_tokens = 1: no worker goes on
    admissions = [c for worker in decode for c in worker.told(Admit)]
    going_on = [request for request in requests if len(continuation(request)[0]) > 1]
    assert len(admissions) == len(going_on) > 3
    handed_over = {
        record.request_id: tuple(record.handover_draft_ids.tolist())
        for records in scene.records.values()
        for record in records
        if record.handover_draft_ids is not None and record.finish_reason is None
    }
    assert any(handed_over.values())
    for command in admissions:
        assert command.draft_token_ids == handed_over[command.request.id]
        (asked,) = [request for request in requests if request.id == command.request.id]
        told = *asked.prompt_token_ids, continuation(asked)[0][0]
        assert command.request.prompt_token_ids == told


def test_requests_go_to_the_rank_with_most_free_slots():
    requests = long_requests()
    scene = Scene(num_ranks=3, num_slots=2).run(requests)
    for worker in scene.workers:
        assert len(worker.told(Admit)) == 2


def test_every_ring_is_read_once_a_round():
    """No ring starves, however many messages the others have."""
    requests = long_requests(4)
    scene = Scene(num_ranks=2, num_slots=2).run(requests)
    ranks = [update.process_rank for update in scene.updates]
    while_both_run = ranks[: 2 * min(ranks.count(0), ranks.count(1))]
    assert while_both_run == [0, 1] * (len(while_both_run) // 2)
    steps = [[u.message.step for u in scene.updates if u.process_rank == r] for r in (0, 1)]
    assert steps == [list(range(len(each))) for each in steps]
    sent = [worker.sent for worker in scene.workers]
    assert [status.ring.messages for status in scene.engine.status] == sent


def test_generations_wrap_around_while_slots_are_reused():
    scene, requests = Scene(num_slots=2), long_requests(6)
    config = scene.engine.config
    again = WorkerSession(scene.workers[0], config, first_generation=2**32 - 2)
    scene.engine.sessions[0] = again
    scene.run(requests)
    seen = {int(g) for update in scene.updates for g in update.message.generation}
    assert seen >= {2**32 - 1, 0, 1}


def test_the_documented_example_runs(monkeypatch, capsys):
    start = functools.partial(Engine, start_worker=Scene(num_prefill_ranks=1).start)
    monkeypatch.setattr("jax_specdec.engine.Engine", start)
    scope = {}
    for code in python_blocks(ROOT / "docs/engine.md"):
        exec(compile(code, "docs/engine.md", "exec"), scope)
    ranks = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] in "01"]
    assert ranks[0] == "1"
    assert set(ranks[1:]) == {"0"}
