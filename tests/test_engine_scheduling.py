"""The engine over scripted workers: abort, preemption, hand-over and lost workers, at any moment.

Whatever happens between two updates, every request's tokens, logprobs, cumulative logprob and
statistics must be those of an undisturbed run, or a beginning of it with the reason why it ended.
"""

import functools
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_specdec.control import Admit, Evict
from jax_specdec.engine import Engine, EngineConfig, WorkerFailed
from jax_specdec.prometheus import status_text
from jax_specdec.records import FinishReason
from jax_specdec.requests import Request, SamplingParams
from tests.scripted_worker import VOCAB, ScriptedWorker, continuation

pytestmark = pytest.mark.fast

CUT_SHORT = {FinishReason.ABORT, FinishReason.RECOVERY_ERROR, FinishReason.WORKER_LOST}


def make_requests(count, seed=0):
    rng = random.Random(seed)
    return [
        Request(
            id=f"r{index}",
            prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))),
            params=SamplingParams(
                max_tokens=rng.choice((1, 2, 9, 20)),
                logprobs=rng.choice((None, 0, 2)),
                stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 1)))),
            ),
        )
        for index in range(count)
    ]


class Scene:
    """An engine over scripted workers, and what it delivered.

    `faults` maps a process rank to the messages that its workers send before they die, one number
    for each worker that is started in that place.
    """

    def __init__(self, *, seed=0, num_slots=2, faults=None, **config):
        self.workers = []
        self.faults = {rank: list(numbers) for rank, numbers in (faults or {}).items()}
        self.seed = seed
        self.engine = Engine(
            EngineConfig(vocab_size=VOCAB, num_slots=num_slots, max_length=64, **config),
            start_worker=self.start,
        )
        self.records, self.updates = {}, []

    def start(self, config, *, process_rank, prefill_only, doorbell):
        assert doorbell == (config.num_ranks + config.num_prefill_ranks > 1)
        faults = self.faults.get(process_rank)
        worker = ScriptedWorker(
            config.num_slots,
            process_rank=process_rank,
            prefill_only=prefill_only,
            seed=self.seed + len(self.workers),
            dies_after=faults.pop(0) if faults else None,
            draft_messages=self.seed % 2 == 1,
        )
        self.workers.append(worker)
        return worker

    def run(self, requests, meddle=lambda scene, n: None):
        """Run to the end, calling `meddle` after each update."""
        self.records = {request.id: [] for request in requests}
        with self.engine:
            for n, update in enumerate(self.engine.generate(requests)):
                assert n < 20_000, "it goes on for ever"
                self.updates.append(update)
                for record in update.records:
                    self.records[record.request_id].append(record)
                meddle(self, n)
        return self

    def tokens(self, name):
        return [t for record in self.records[name] for t in record.token_ids.tolist()]

    def finish_reason(self, name):
        return self.records[name][-1].finish_reason if self.records[name] else None


def check(scene, requests):
    """Nothing is lost, doubled or changed; every request ends once."""
    for request in requests:
        records = scene.records[request.id]
        tokens, logprobs = continuation(request)
        got = scene.tokens(request.id)
        assert got == tokens[: len(got)]
        ends = [record.finish_reason for record in records if record.finish_reason is not None]
        assert len(ends) == 1
        assert records[-1].finish_reason is ends[0]
        if ends[0] not in CUT_SHORT:
            assert got == tokens
            stopped = tokens[-1] in request.params.stop_token_ids
            assert ends[0] is (FinishReason.STOP_TOKEN if stopped else FinishReason.LENGTH)
        totals = list(itertools.accumulate(logprobs, initial=0.0))
        position = 0
        for record in records:
            position += record.num_tokens
            if request.params.logprobs is None:
                assert record.cumulative_logprob is None
            else:
                assert record.cumulative_logprob == totals[position]
                assert (
                    record.logprobs[:, 0].tolist()
                    == (logprobs[position - record.num_tokens : position])
                )
        statistics = records[-1].statistics
        assert statistics.num_tokens == len(got)
        assert statistics.num_drafts == sum(record.num_drafts for record in records)
        assert statistics.steps == sum(record.num_tokens > 0 for record in records)
    everywhere = sum(rank.state.statistics.num_tokens for rank in scene.engine.ranks)
    assert everywhere == sum(len(scene.tokens(request.id)) for request in requests)


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


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(1, 9),
    ranks=st.integers(1, 3),
    prefill_ranks=st.integers(0, 2),
    aborts=st.sampled_from((0.0, 0.0, 0.05)),
    preemptions=st.sampled_from((0.0, 0.1, 0.3)),
    stops=st.sampled_from((0.0, 0.0, 0.05)),
    losses=st.booleans(),
)
def test_whatever_happens_nothing_is_lost_or_doubled(
    seed, count, ranks, prefill_ranks, aborts, preemptions, stops, losses
):
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
    )
    scene.run(requests, meddler(seed, aborts=aborts, preemptions=preemptions, stops=stops))
    check(scene, requests)
    assert all(rank.num_free == 2 for rank in scene.engine.ranks)
    if not scene.engine.config.resume_lost or not losses:
        return
    reasons = {scene.finish_reason(request.id) for request in requests}
    assert FinishReason.WORKER_LOST not in reasons


def test_that_comparison_can_fail():
    requests = make_requests(4)
    scene = Scene().run(requests)
    check(scene, requests)
    doubled = max(scene.records.values(), key=len)
    doubled.insert(1, doubled[0])
    with pytest.raises(AssertionError):
        check(scene, requests)


def test_a_preempted_request_goes_on_where_it_was():
    requests = make_requests(3, seed=4)

    def meddle(scene, n):
        if n % 3 == 0:
            for name in scene.engine.running:
                assert scene.engine.preempt(name)

    scene = Scene(seed=4).run(requests, meddle)
    check(scene, requests)
    assert scene.engine.status[0].processor.preempted > 3
    worker = scene.workers[0]
    again = [c for c in worker.commands if isinstance(c, Admit)][3:]
    originals = {request.id: request for request in requests}
    assert again
    for command in again:  # what was emitted is part of the prompt now
        original = originals[command.request.id]
        emitted = command.request.prompt_token_ids[len(original.prompt_token_ids) :]
        assert list(emitted) == scene.tokens(original.id)[: len(emitted)]
        left = original.params.max_tokens - len(emitted)
        assert command.request.params.max_tokens == left


def test_a_preempted_request_comes_before_those_that_wait():
    requests = [
        Request(id=f"r{n}", prompt_token_ids=(n,), params=SamplingParams(max_tokens=20))
        for n in range(4)
    ]
    asked = []

    def meddle(scene, n):
        if not asked and scene.records["r0"]:
            asked.append(scene.engine.preempt("r0"))

    scene = Scene(num_slots=1).run(requests, meddle)
    order = [c.request.id for c in scene.workers[0].commands if isinstance(c, Admit)]
    assert asked == [True]
    assert order == ["r0", "r0", "r1", "r2", "r3"]
    check(scene, requests)


def test_a_recovery_stop_ends_a_request_with_an_error():
    requests = make_requests(3, seed=9)

    def meddle(scene, n):
        scene.engine.preempt("r0", reschedule=False)

    scene = Scene().run(requests, meddle)
    check(scene, requests)
    assert scene.finish_reason("r0") is FinishReason.RECOVERY_ERROR
    assert scene.engine.status[0].processor.preempted == 0


@pytest.mark.parametrize("when", [0, 3])
def test_an_abort_ends_a_request_that_runs_or_waits(when):
    requests = [
        Request(id=f"r{n}", prompt_token_ids=(n,), params=SamplingParams(max_tokens=20, logprobs=0))
        for n in range(4)
    ]
    answers = []

    def meddle(scene, n):
        if n == when:
            answers.extend([scene.engine.abort("r0"), scene.engine.abort("r3")])
            answers.extend([scene.engine.abort("r0"), scene.engine.abort("nobody")])

    scene = Scene(num_slots=2).run(requests, meddle)
    assert answers == [True, True, False, False]
    check(scene, requests)
    for name in ("r0", "r3"):
        assert scene.finish_reason(name) is FinishReason.ABORT
    assert scene.tokens("r3") == []
    assert scene.records["r3"][0].cumulative_logprob == 0.0
    assert scene.finish_reason("r1") is FinishReason.LENGTH


def test_abort_and_preempt_leave_what_has_ended_alone():
    requests = make_requests(2)
    scene = Scene()
    assert not scene.engine.abort("r0")
    assert not scene.engine.preempt("r0")
    scene.run(requests)
    assert not scene.engine.abort("r0")
    assert not scene.engine.preempt("r0")
    assert not [c for c in scene.workers[0].commands if isinstance(c, Evict)]


def test_one_worker_prefills_and_others_decode():
    requests = make_requests(8, seed=2)
    scene = Scene(num_ranks=2, num_prefill_ranks=1).run(requests)
    check(scene, requests)
    decode, prefill = scene.workers[:2], scene.workers[2]
    assert not any(worker.prefill_only for worker in decode)
    assert prefill.prefill_only
    assert len([c for c in prefill.commands if isinstance(c, Admit)]) == 8
    for request in requests:
        first, *others = scene.records[request.id]
        tokens, _ = continuation(request)
        assert first.token_ids.tolist() == tokens[:1]
        if len(tokens) == 1:  # a stop, or max_tokens = 1: nobody goes on
            assert others == []
            assert first.finish_reason in (FinishReason.LENGTH, FinishReason.STOP_TOKEN)
        else:
            assert first.finish_reason is None
    admissions = [c for worker in decode for c in worker.commands if isinstance(c, Admit)]
    going_on = [request for request in requests if len(continuation(request)[0]) > 1]
    assert len(admissions) == len(going_on) > 3
    handed_over = {
        record.request_id: tuple(record.handover_draft_ids.tolist())
        for records in scene.records.values()
        for record in records[:1]
        if record.finish_reason is None
    }
    assert any(handed_over.values())
    for command in admissions:
        assert command.draft_token_ids == handed_over[command.request.id]
        original = next(r for r in requests if r.id == command.request.id)
        assert command.request.prompt_token_ids == (
            *original.prompt_token_ids, continuation(original)[0][0]
        )  # fmt: skip


def test_requests_go_to_the_rank_with_most_free_slots():
    requests = [
        Request(id=f"r{n}", prompt_token_ids=(n,), params=SamplingParams(max_tokens=5))
        for n in range(6)
    ]
    scene = Scene(num_ranks=3, num_slots=2).run(requests)
    check(scene, requests)
    for worker in scene.workers:
        assert len([c for c in worker.commands if isinstance(c, Admit)]) == 2


def test_every_ring_is_read_once_a_round():
    """No ring starves, however many messages the others have."""
    requests = [
        Request(id=f"r{n}", prompt_token_ids=(n,), params=SamplingParams(max_tokens=20))
        for n in range(4)
    ]
    scene = Scene(num_ranks=2, num_slots=2).run(requests)
    ranks = [update.process_rank for update in scene.updates]
    while_both_run = ranks[: 2 * min(ranks.count(0), ranks.count(1))]
    assert while_both_run == [0, 1] * (len(while_both_run) // 2)
    steps = [[u.message.step for u in scene.updates if u.process_rank == r] for r in (0, 1)]
    assert steps == [list(range(len(each))) for each in steps]
    sent = [worker.sent for worker in scene.workers]
    assert [status.ring.messages for status in scene.engine.status] == sent


def long_requests(count=6):
    return [
        Request(id=f"r{n}", prompt_token_ids=(n,), params=SamplingParams(max_tokens=20, logprobs=0))
        for n in range(count)
    ]


def test_a_lost_rank_is_reported_and_the_others_go_on():
    requests = long_requests()
    scene = Scene(num_ranks=2, faults={1: [3]}, on_worker_loss="continue").run(requests)
    check(scene, requests)
    (report,) = [update for update in scene.updates if update.lost]
    assert report.process_rank == 1
    assert "rank 1" in str(report.lost)
    lost = [record.request_id for record in report.records]
    assert len(lost) == 2
    for request in requests:
        ended = FinishReason.WORKER_LOST if request.id in lost else FinishReason.LENGTH
        assert scene.finish_reason(request.id) is ended
    assert [status.alive for status in scene.engine.status] == [True, False]


def test_lost_requests_may_go_on_elsewhere():
    requests = long_requests()
    scene = Scene(num_ranks=2, faults={1: [5]}, on_worker_loss="continue", resume_lost=True)
    scene.run(requests)
    check(scene, requests)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}
    (report,) = [update for update in scene.updates if update.lost]
    assert len(report.records) == 0 or report.process_rank == 1


def test_a_lost_rank_may_be_restarted():
    requests = long_requests()
    scene = Scene(faults={0: [4, 2]}, on_worker_loss="restart", resume_lost=True).run(requests)
    check(scene, requests)
    assert len(scene.workers) == 3
    assert [update.process_rank for update in scene.updates if update.lost] == [0, 0]
    (status,) = scene.engine.status
    assert (status.restarts, status.alive) == (2, True)
    assert status.ring.messages == scene.workers[2].sent
    assert status.statistics.num_tokens == 6 * 20  # of all its workers


def test_every_rank_has_its_numbers():
    texts = []

    def meddle(scene, n):
        texts.append(status_text(scene.engine.status))

    scene = Scene(num_ranks=2, num_prefill_ranks=1, faults={1: [3]}, on_worker_loss="restart",
                  resume_lost=True)  # fmt: skip
    scene.run(long_requests(), meddle)
    samples = dict(
        line.removeprefix("jax_specdec_").rsplit(" ", 1)
        for line in status_text(scene.engine.status).splitlines()
        if line[0] != "#"
    )
    for name, values in (
        ("worker_up", ["1", "1", "1"]),
        ("worker_restarts_total", ["0", "1", "0"]),
        ("ring_messages_total", [str(scene.workers[place].sent) for place in (0, 3, 2)]),
        ("live_requests", ["0", "0", "0"]),
    ):
        assert [samples[f'{name}{{process_rank="{rank}"}}'] for rank in range(3)] == values
    key = 'finished_requests_total{process_rank="2",reason="prefill_handover"}'
    assert samples[key] == "6"
    tokens = [int(samples[f'tokens_total{{process_rank="{rank}"}}']) for rank in range(3)]
    assert tokens[2] == 6
    assert sum(tokens) == 6 * 20
    assert any('live_requests{process_rank="0"} 2' in text for text in texts)


def test_restarts_come_to_an_end():
    scene = Scene(faults={0: [0] * 9}, on_worker_loss="restart", max_restarts=2)
    with pytest.raises(WorkerFailed, match="rank 0"):
        scene.run(long_requests())
    assert len(scene.workers) == 3
    with pytest.raises(WorkerFailed):  # nobody is left
        list(scene.engine.generate(long_requests()))


def test_when_everything_stops_every_request_that_began_is_closed():
    requests = long_requests(9)

    def meddle(scene, n):
        if n == 5:
            scene.engine.preempt("r0")

    scene = Scene(num_ranks=2, num_slots=1, num_prefill_ranks=1, faults={1: [9]})
    with pytest.raises(WorkerFailed, match="rank 1"):
        scene.run(requests, meddle)
    began = [name for name, records in scene.records.items() if records]
    assert len(began) > 3  # two in slots, others between the prefill worker and a slot
    for name in began:
        ends = [r.finish_reason for r in scene.records[name] if r.finish_reason]
        assert ends.count(FinishReason.WORKER_LOST) == 1 or ends[-1] is FinishReason.LENGTH
        assert scene.records[name][-1].finish_reason is ends[-1]


def test_without_its_prefill_worker_an_engine_decodes_all_the_same():
    requests = long_requests()
    scene = Scene(num_prefill_ranks=1, faults={1: [2]}, on_worker_loss="continue",
                  resume_lost=True)  # fmt: skip
    scene.run(requests)
    check(scene, requests)
    assert {scene.finish_reason(request.id) for request in requests} == {FinishReason.LENGTH}


def test_the_documented_example_runs(monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "engine.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    start = functools.partial(Engine, start_worker=Scene(num_prefill_ranks=1).start)
    monkeypatch.setattr("jax_specdec.engine.Engine", start)
    exec(compile(code, "docs/engine.md", "exec"), {})
    ranks = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] in "01"]
    assert ranks[0] == "1"
    assert set(ranks[1:]) == {"0"}


def test_two_runs_at_once_are_refused():
    scene = Scene()
    stream = scene.engine.generate(long_requests())
    next(stream)
    with pytest.raises(RuntimeError, match="is generating"):
        next(scene.engine.generate(long_requests()))
    stream.close()
    scene.run(long_requests())
    check(scene, long_requests())


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_ranks", 0), ("num_prefill_ranks", -1), ("max_restarts", -1),
     ("on_worker_loss", "cry")],
)  # fmt: skip
def test_a_deployment_that_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value!r} must be"):
        EngineConfig(vocab_size=VOCAB, **{field: value})
