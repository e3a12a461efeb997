"""An engine over scripted workers: what it delivers, and what it must have delivered."""

import contextlib
import itertools
import random
from types import SimpleNamespace

from jax_specdec.control import Admit
from jax_specdec.declaration import EVERYTHING
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.records.batch import FinishReason
from tests.support.requests import request as request_of
from tests.support.scripted_worker import VOCAB, ScriptedWorker, continuation, logprob

CUT_SHORT = {
    FinishReason.ABORT, FinishReason.RECOVERY_ERROR, FinishReason.WORKER_LOST,
    FinishReason.ATTEMPTS_EXHAUSTED,
}  # fmt: skip


class FakeClock:
    """Time that passes only while somebody sleeps, and a little whenever it is asked for.

    Attributes:
      slept: the seconds of each sleep.
    """

    def __init__(self, tick=0.001):
        self.time, self.tick, self.slept = 0.0, tick, []

    def now(self):
        self.time += self.tick
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds


def make_requests(count, seed=0):
    rng = random.Random(seed)
    return [
        request_of(
            f"r{index}",
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))],
            max_tokens=rng.choice((1, 2, 9, 20)),
            logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=rng.choice((None, 0, 2)),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 1)))),
        )
        for index in range(count)
    ]


def long_requests(count=6):
    return [request_of(f"r{n}", (n % VOCAB,), max_tokens=20, logprobs=0) for n in range(count)]


def parts_of(engine):
    """What stands behind an engine's door: streams, workers, and who gives them requests."""
    return SimpleNamespace(
        streams=engine._streams, workers=engine._workers, scheduler=engine._scheduler
    )


class Scene:
    """An engine over scripted workers, and what it delivered.

    It has no thread: who waits for it makes its rounds, by the clock of the scene.

    `faults` maps a process rank to numbers of messages: its first worker dies after the first
    number, the worker that replaces it after the second, and so on.
    """

    def __init__(self, *, seed=0, num_slots=2, faults=None, worker=ScriptedWorker, **config):
        # In the order in which they were started.
        self.workers, self.configs, self.resumed = [], [], []
        self.worker = worker
        self.faults = {rank: list(numbers) for rank, numbers in (faults or {}).items()}
        self.seed = seed
        self.clock = FakeClock()
        usual = {"num_slots": num_slots, "max_length": 64, "serves": EVERYTHING}
        self.engine = Engine(
            EngineConfig(vocab_size=VOCAB, **usual | config),
            start_worker=self.start,
            clock=self.clock,
        )
        parts = vars(parts_of(self.engine)).values()
        self.open_streams, self.engine_workers, self.scheduler = parts
        self.open_streams.start = self.serve
        self.engine_workers.wakeup = None  # time passes by the scene's clock
        self.records, self.updates = {}, []

    def round(self, times=1):
        for _ in range(times):
            self.open_streams.round()

    def serve(self):
        """Make rounds while the caller waits for an update of the weights, or for ends."""
        streams = self.open_streams
        with contextlib.suppress(WorkerFailed):
            while (streams.current_update and not streams.current_update.over) or any(
                reader.abandoned and reader.num_open for reader in streams.readers
            ):
                self.round()

    def generate(self, requests):
        """What `Engine.generate` yields."""
        streams = self.open_streams
        updates = streams.generate(requests)
        try:
            while updates.num_open:
                try:
                    self.round()
                except BaseException as error:  # as the thread does; `updates` raises it at last
                    streams.fail(error)
                while updates.num_waiting:
                    yield next(updates)
            yield from updates
        finally:
            streams.leave(updates)

    def start(self, config, *, process_rank, prefill_only, doorbell, resumes=None, **_):
        self.configs.append(config)
        self.resumed.append(resumes)
        assert doorbell == (config.num_ranks + config.num_prefill_ranks > 1)
        faults = self.faults.get(process_rank)
        worker = self.worker(
            config.num_slots,
            process_rank=process_rank,
            prefill_only=prefill_only,
            seed=self.seed + len(self.workers),
            dies_after=faults.pop(0) if faults else None,
            draft_messages=self.seed % 2 == 1,
        )
        worker.weights_version = config.weights_version
        self.workers.append(worker)
        return worker

    def run(self, requests, meddle=lambda scene, n: None):
        """Run to the end, calling `meddle` after each update, and check what was delivered."""
        self.records = {request.id: [] for request in requests}
        with self.engine:
            for n, update in enumerate(self.generate(requests)):
                assert n < 20_000, "it does not end"
                self.updates.append(update)
                for record in update.records:
                    self.records[record.request_id].append(record)
                meddle(self, n)
        check(self, requests)
        return self

    def tokens(self, name):
        return [t for record in self.records[name] for t in record.token_ids.tolist()]

    def finish_reason(self, name):
        return self.records[name][-1].finish_reason if self.records[name] else None


def check_prompt(request, records):
    """Check that every asked row comes once, in order, before the first token; no other comes."""
    prompt = list(request.prompt_token_ids)
    places, logprobs = [], []
    for record in records:
        if record.prompt is not None:
            assert len(places) < len(prompt) - 1, "more rows than the prompt has"
            places += range(record.prompt.start, record.prompt.start + len(record.prompt.token_ids))
            logprobs += record.prompt.logprobs[:, 0].tolist()
        elif record.num_tokens and request.params.prompt_logprobs is not None:
            assert len(places) == len(prompt) - 1
    due = [] if request.params.prompt_logprobs is None else list(range(1, len(prompt)))
    assert places == due[: len(places)]
    assert logprobs == [logprob(prompt[:place]) for place in places]


def check(scene, requests):
    """Check that nothing is lost, doubled or changed, and every request ends once."""
    tokens_in_all = {r.id: len(r.prompt_token_ids) + r.params.max_tokens for r in requests}
    for command in itertools.chain.from_iterable(worker.told(Admit) for worker in scene.workers):
        told = command.request  # what was emitted is part of the prompt
        length = len(told.prompt_token_ids) + told.params.max_tokens
        assert length == tokens_in_all[told.id]
    for request in requests:
        records = scene.records[request.id]
        tokens, logprobs = continuation(request)
        got = scene.tokens(request.id)
        assert got == tokens[: len(got)]
        (end,) = (record.finish_reason for record in records if record.finish_reason is not None)
        assert records[-1].finish_reason is end
        if end not in CUT_SHORT:
            assert got == tokens
            stopped = tokens[-1] in request.params.stop_token_ids
            assert end is (FinishReason.STOP_TOKEN if stopped else FinishReason.LENGTH)
        check_prompt(request, records)
        totals = list(itertools.accumulate(logprobs, initial=0.0))
        position = 0
        for record in records:
            position += record.num_tokens
            asked = request.params.logprobs is not None
            assert record.cumulative_logprob == (totals[position] if asked else None)
            before = position - record.num_tokens
            assert not asked or record.logprobs[:, 0].tolist() == logprobs[before:position]
        statistics = records[-1].statistics
        assert statistics.num_tokens == len(got)
        assert statistics.num_drafts == sum(record.num_drafts for record in records)
        assert statistics.steps == sum(record.num_tokens > 0 for record in records)
    everywhere = sum(each.state.statistics.num_tokens for each in scene.engine.sessions)
    assert everywhere == sum(len(scene.tokens(request.id)) for request in requests)
