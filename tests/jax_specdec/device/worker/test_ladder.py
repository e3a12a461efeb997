"""A worker compiles what it serves before it is ready, and nothing afterwards."""

import contextlib
import functools
import threading
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.control import Phase, ProcessStats, WorkerConfig
from jax_specdec.declaration import EVERYTHING, USUAL, Serves
from jax_specdec.device.drafting.drafters import NgramDrafter
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.kinds import Ladder, PromptKind, StepKind
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.device.messages.logit_changes import ChangesSize
from jax_specdec.device.worker import prepared, worker_process
from jax_specdec.device.worker.prepared import Arguments, CannotCompile, compile_ladder
from jax_specdec.requests import SamplingParams
from tests.support import letters
from tests.support.asking import params
from tests.support.compiled_here import compiled_here
from tests.support.decoding import Local, request, tokens_of

PROMPT = [1, 2, 3, 1, 2, 3, 1]
GRAMMAR = {"structured": letters.WORDS_PATTERN, "stop_token_ids": (letters.END,)}
# What a request may ask for, one after another and together.
ASKED = (
    {},
    {"logprobs": 3},
    {"temperature": 0.7},
    {"temperature": 0.7, "logprobs": 2, "extra_token_ids": (4, 9)},
    {"logit_bias": ((5, 30.0),), "min_tokens": 2, "stop_token_ids": (9,)},
    {"presence_penalty": 0.5, "temperature": 0.9, "logprobs": 1},
    {"prompt_logprobs": 2},
    GRAMMAR,
)
SMALL = Serves.of(SamplingParams(**one) for one in ASKED)


def make(drafting="ngram", serves=SMALL, **options):
    """A worker with programs of its own, none of which is compiled."""
    config = Local(drafting).worker.config
    options = {"adaptive": True, "vocabulary": letters.vocabulary} | options
    return Local(drafting, programs=Compiled(config), serves=serves, **options)


def compile_all(local, tell=lambda done, total, name: None, **which):
    worker = local.worker
    prompt = worker.ladder.prompt
    kinds = [*worker.kinds(**which), *([] if prompt is None else [prompt])]
    arguments = Arguments.of(worker.params, worker.state)
    compile_ladder(worker.compiled, kinds, arguments, worker.prefill_chunk, tell)


def prepare(local, **which):
    compile_all(local, **which)
    local.worker.rehearse(local.worker.kinds(**which))


@pytest.mark.long
def test_compiling_tells_how_far_it_is():
    local, told = make(), []
    compile_all(local, lambda *one: told.append(one))
    assert not local.sent
    counts = [done for done, _, _ in told]
    assert counts == sorted(counts)
    # Five rungs with and without drafts, and two of prompts.
    assert told[-1][:2] == (12, 12)
    assert len({name for _, _, name in told}) == 12


@pytest.mark.long
def test_a_rehearsal_leaves_nothing_behind():
    asked = [request(f"r{n}", PROMPT, max_tokens=9, seed=n, **ASKED[n]) for n in (0, 3, 5)]
    told = []
    for rehearsed in (False, True):
        local = make(adaptive=False)
        if rehearsed:
            local.worker.rehearse(local.worker.kinds())
        for item in asked:
            local.admit(item)
        local.drain()
        told.append([tokens_of(local.records[item.id]) for item in asked])
        assert local.records["r0"][0].step == local.records["r3"][0].step == 0
    assert told[0] == told[1]


@pytest.mark.long
def test_a_rehearsal_tells_what_drafts_cost():
    """So no first request makes steps for that alone; negative control: without it, one does."""
    for rehearsed in (True, False):
        local = make()
        if rehearsed:
            local.worker.rehearse(local.worker.kinds())
        widths = local.worker.step_widths
        assert (len({*widths.told} & {None, 0}) == 2) == rehearsed
        seen = []
        choose = widths.cheapest
        widths.cheapest = lambda *one, c=choose, s=seen: s.append(kind := c(*one)) or kind
        widths.saw([1] * 3, [~0] * 3)
        for kind in (StepKind(samples=True), StepKind()):
            widths.choose(kind, local.worker.slots, local.worker.narrower(kind))
            widths.took(seen[-1], 1.0)
            widths.choose(kind, local.worker.slots, local.worker.narrower(kind))
            widths.took(seen[-1], 1.0)
        alternates = seen[0] != seen[1]
        assert alternates != rehearsed


def test_a_batch_takes_the_lowest_rung_that_serves_it():
    worker = make(serves=USUAL).worker
    for asked, rung in (
        ([{}], "greedy step"),
        ([{}, {"logprobs": 0}], "greedy step with K = 20"),
        ([{"temperature": 0.1}], "sampled step"),
        ([{"temperature": 0.1}, {"logprobs": 5}], "sampled step with K = 20"),
        ([{}, {"repetition_penalty": 1.1}], None),
        ([{"logit_bias": {3: 1.0}}], None),
        ([GRAMMAR], None),
    ):
        slots = [Slot(params=SamplingParams(**one), most_tokens=1) for one in asked]
        kind = worker.kind_of(slots)
        assert str(kind) == (rung or "sampled step with K = 20, biases, penalties, grammars")
        assert kind in worker.ladder.rungs


def test_a_ladder_has_no_rung_that_nobody_asked_for():
    config = Local("ngram").worker.config

    def names(*, alike=False, **asked):
        serves = Serves.of([SamplingParams(**asked)])
        assert serves.alike
        ladder = Ladder.of(replace(serves, alike=alike), config, 8)
        return [str(rung) for rung in ladder.rungs], ladder.prompt

    assert names() == (["greedy step"], None)
    assert names(logprobs=5)[0] == ["greedy step", "greedy step with K = 5"]
    assert names(temperature=1.0)[0] == ["greedy step", "sampled step"]
    changed = ["greedy step", "greedy step with biases"]
    assert names(logit_bias={1: 1.0})[0] == changed
    assert names(logit_bias={1: 1.0}, alike=True)[0] == changed[1:]
    assert names(prompt_logprobs=3)[1] == PromptKind(8, Widths(k=5))
    ladder = Ladder.of(EVERYTHING, config, 8, draws=True)
    assert ladder.rungs[-1] == StepKind(
        Widths(k=32, chosen=128, mode=LogprobsMode.PROCESSED, kept=True, values=15),
        reports_drafts=True, samples=True, changes=ChangesSize(1024, True, True, True),
    )  # fmt: skip
    assert len(ladder.rungs) == 7


def test_values_of_rows_are_those_of_the_costliest_rung():
    """A batch that asks for none runs the programs of a worker that serves none."""
    config = Local("ngram").worker.config
    ladders = [Ladder.of(replace(USUAL, **more), config, 8) for more in ({}, {"entropy": True})]
    without, ladder = (ladder.rungs for ladder in ladders)
    assert {rung.widths.values for rung in without} == {0}
    assert {rung for rung in ladder if not rung.widths.values} <= {*without}
    asked = [{"logprobs": 1}, {"logprobs": 1, "temperature": 0.5}]
    for one in asked:
        for value, place in ((False, 0), (True, 1)):
            params = SamplingParams(**one, entropy=value)
            kind = ladders[1].lowest(StepKind.of_slots([Slot(params=params, most_tokens=1)], 32))
            assert kind.widths.values == place


def test_a_worker_refuses_a_request_beyond_what_it_serves():
    """Whoever sent it: nothing is compiled for it in silence."""
    local = make(serves=Serves.of([SamplingParams()]))
    for asked, field in (({"logprobs": 2}, "max_logprobs"), ({"prompt_logprobs": 0}, "of_prompts")):
        with pytest.raises(ValueError, match=rf"'more' asks for .* serves \w*{field} = None"):
            local.admit(request("more", PROMPT, **asked))
        local.rank.leave("more")


@given(st.lists(params, min_size=1, max_size=3))
def test_a_ladder_serves_all_that_is_declared(asked):
    """In any company, with fewer columns, and whoever drafts."""
    model = ModelConfig.tiny(vocab_size=300)
    config = LoopConfig(model, NgramDrafter(3), num_slots=3, max_length=96)
    for draws in (False, True):
        ladder = Ladder.of(Serves.of(asked), config, 8, draws=draws)
        for count in range(len(asked) + 1):
            slots = [Slot(params=one, most_tokens=1) for one in asked[:count]]
            exact = StepKind.of_slots([*slots, Slot()], model.vocab_size, draws=draws)
            assert ladder.lowest(exact).serves(exact)
        prompts = [one for one in asked if one.prompt_logprobs is not None]
        for one in prompts:
            kind = PromptKind.of_slot(Slot(params=one, score_from=0), config, 8)
            assert all(a >= b for a, b in zip(ladder.prompt.widths, kind.widths, strict=True))
            assert ladder.prompt.chunk <= kind.chunk


def test_a_rung_that_cannot_be_compiled_is_named(monkeypatch):
    """Where it is traced, and where it is compiled."""
    local = make(serves=Serves.of([SamplingParams(logprobs=2)]))
    said = r"prompts: .* cannot be compiled: RuntimeErr.*no r"
    fails = mock.patch.object(prepared, "compiled_anew", side_effect=RuntimeError("no room"))
    with fails, pytest.raises(CannotCompile, match=said):
        prepare(local)
    batch = prepared.compile_batch

    def of_logprobs(programs, kind, *more):
        if kind.widths.k is not None:
            raise ValueError("too large")
        batch(programs, kind, *more)

    monkeypatch.setattr(prepared, "compile_batch", of_logprobs)
    with pytest.raises(CannotCompile, match=r"greedy step with K = 5: .* ValueError: too large"):
        prepare(local)


@pytest.mark.parametrize("error", [None, SystemExit(1), ValueError("wrong")])
def test_a_process_ends_though_something_is_compiled_beside(error, monkeypatch, capfd):
    """Its status tells of the error; where nothing is compiled any more, it ends as ever."""
    statuses, may_end = [], threading.Event()
    monkeypatch.setattr(worker_process.os, "_exit", statuses.append)
    thread = threading.Thread(target=may_end.wait)

    def run():
        with worker_process.ending_at_once([thread]):
            if error is not None:
                raise error

    thread.start()
    run()
    assert statuses == [0 if error is None else 1]
    assert ("ValueError: wrong" in capfd.readouterr().err) == isinstance(error, ValueError)
    may_end.set()
    thread.join()
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
        run()
    assert len(statuses) == 1


def test_steps_without_drafts_are_compiled_beside_the_first_ones():
    """And made once they are."""
    local, stats = make(serves=Serves.of([SamplingParams()])), ProcessStats()
    settings = WorkerConfig(vocab_size=9, starts_soon=True)
    before = functools.partial(worker_process.kinds_before_ready, settings, None)
    worker_process.compile_served(local.worker, stats, before)
    assert (stats.heartbeat.phase, stats.heartbeat.done) == (Phase.COMPILING, 2)
    beside = worker_process.compile_beside(local.worker, before(local.worker))
    local.admit(request("r0", PROMPT, max_tokens=60))
    ((narrow, compiled),) = local.worker.coming.items()
    assert narrow.num_drafts == 0
    kinds, run_kind = [], local.worker.run_kind
    local.worker.run_kind = lambda kind: kinds.append(kind) or run_kind(kind)
    for is_there in (False, True):
        with compiled_here() as names:
            local.advance(9)
        assert (names, compiled.done(), narrow in kinds) == ([], is_there, is_there)
        if not is_there:
            beside.start()
            beside.join()


WAITING = {
    "ids": {},
    "logprobs": {"logprobs": 2},
    "drawn": {"temperature": 0.7},
    "of a prompt": {"prompt_logprobs": 1},
}


def serve(local, name, **asked):
    """Run a request to its end, and free its slot."""
    local.admit(request(name, PROMPT, max_tokens=4, **asked))
    local.drain()
    assert len(local.token_ids(name)) == 4
    local.rank.leave(name)


@pytest.mark.parametrize("first", ["logprobs", "of a prompt"])
def test_a_successor_has_what_waiting_requests_need_first(first):
    """Nothing is compiled in their steps; those of other kinds wait for their programs."""
    local = make(serves=Serves.of(SamplingParams(**asked) for asked in WAITING.values()))
    worker, params = local.worker, SamplingParams(**WAITING[first])
    settings = WorkerConfig(vocab_size=9)
    kinds = worker_process.kinds_before_ready(settings, Serves.of([params]), worker)
    assert 0 < len(kinds) < len(worker.kinds())
    worker_process.compile_served(worker, ProcessStats(), lambda worker: kinds)
    beside = worker_process.compile_beside(worker, kinds)
    assert not {*kinds} & {*worker.coming}
    assert {*kinds} | {*worker.coming} == {*worker.kinds(), worker.ladder.prompt}
    with compiled_here() as names:
        serve(local, "r0", **WAITING[first])
    assert names == []
    beside.start()
    for name, asked in WAITING.items():
        serve(local, name, **asked)
    beside.join()
    with compiled_here() as names:
        for name, asked in WAITING.items():
            serve(local, f"{name} again", **asked)
    assert names == []
    assert all(compiled.done() for compiled in worker.coming.values())


def test_a_program_that_cannot_be_compiled_beside_is_named(monkeypatch):
    local = make()
    worker, params = local.worker, SamplingParams()
    settings = WorkerConfig(vocab_size=9)
    kinds = worker_process.kinds_before_ready(settings, Serves.of([params]), worker)
    worker_process.compile_served(worker, ProcessStats(), lambda worker: kinds)
    failing = mock.Mock(side_effect=ValueError("too large"))
    monkeypatch.setattr(worker_process, "compile_one", failing)
    beside = worker_process.compile_beside(worker, kinds)
    beside.start()
    beside.join()
    serve(local, "r0")  # without the narrower steps
    with pytest.raises(CannotCompile, match="sampled step: too large"):
        serve(local, "r1", temperature=0.7)
