"""Requests that need programs which are not there yet wait for them, and the others go on."""

import gc
import weakref

import jax
import pytest

from jax_specdec.control import Evict, WorkerConfig
from jax_specdec.device.loop.kinds import Kind, PromptKind
from jax_specdec.device.loop.programs import KeptPrograms
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.device.worker.worker_process import compiles_in_background
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import SamplingParams
from tests.support.compiled_here import compiled_here
from tests.support.decoding import Local, request
from tests.support.jobs_by_hand import ByHand, settle

pytestmark = pytest.mark.fast
PROMPT = [1, 2, 3, 1, 2, 3, 1]


def make(programs, **options):
    """A worker on which r0 runs, with logprobs of K = 2."""
    local = Local("ngram", compiler=ByHand(), programs=programs, **options)
    local.compiler = local.worker.new_kinds._compiler
    local.admit(request("r0", PROMPT, max_tokens=80, logprobs=2))
    assert not local.advance()
    assert local.worker.num_held == 1
    settle(local)
    while not local.advance():
        pass
    return local


def kept(drafting="ngram", **options):
    return KeptPrograms(Local(drafting).worker.config, **options)


programs = pytest.fixture(scope="module")(lambda: kept())


@pytest.fixture
def local(programs):
    """Such a worker, for which nothing is ready; what other tests have compiled is quick."""
    programs._ready.clear()
    return make(programs)


def tokens(records):
    told = {}
    for record in records:
        told.setdefault(record.request_id, []).extend(record.token_ids.tolist())
    return told


def test_the_others_go_on_while_a_request_waits_and_then_it_is_as_if_it_had_come_then():
    local = make(kept())
    local.admit(request("r1", PROMPT, max_tokens=4, logit_bias=((5, 30.0),), logprobs=7))
    before = local.worker.step_number
    with compiled_here() as names:
        told = tokens(local.advance(6))
        assert names == []
    assert local.worker.step_number == before + 6
    assert set(told) == {"r0"}
    assert len(told["r0"]) >= 6
    assert local.worker.num_held == 1
    assert local.compiler.busy
    local.compiler.finish()
    with compiled_here() as names:
        told = tokens(local.advance(8))
        assert names == []  # what the job has compiled is all that is needed
    assert told["r1"] == [5, 5, 5, 5]
    assert len(told["r0"]) >= 8
    assert local.worker.num_held == 0


def test_who_compiles_in_the_background_of_steps():
    group = {"tensor_parallel": 2, "processes": True}
    configs = [WorkerConfig(vocab_size=32, **one) for one in ({}, {"tensor_parallel": 2}, group)]
    assert [compiles_in_background(config) for config in configs] == [True, True, False]


def test_jobs_give_way_while_a_step_is_made_and_go_on_while_it_is_awaited(local):
    local.compiler.turns.clear()
    local.advance(2)
    assert local.compiler.turns == 2 * [True, False, "end", "end"]


def test_a_job_begins_in_another_step_than_an_admission(local):
    """Both take their time from the others' step."""
    local.admit(request("r1", PROMPT, max_tokens=3, logprobs=31))
    local.advance()
    local.admit(request("r2", PROMPT, max_tokens=3, logit_bias=((5, 30.0),)))
    local.compiler.finish()
    started = local.compiler.started
    local.advance()
    assert local.worker.num_held == 1
    assert local.compiler.started == started
    local.advance()
    assert local.compiler.started == started + 1


@pytest.mark.parametrize("together", [True, False])
def test_a_request_that_a_compiled_kind_serves_does_not_wait(local, together):
    """Be it the batch's own kind or one that serves more."""
    held_back = {"min_tokens": 2, "stop_token_ids": (9,)}  # a bias alone has no table of those ids
    bias, most = ((5, 30.0),), 60 if together else 3
    local.admit(request("r1", PROMPT, max_tokens=most, logit_bias=bias, logprobs=20, **held_back))
    local.advance()
    settle(local)
    local.advance(6)
    if not together:
        local.rank.leave("r1")
    local.admit(request("r2", PROMPT, max_tokens=3, logprobs=2, **held_back))
    with compiled_here() as names:
        assert len(tokens(local.advance(6))["r2"]) == 3
        assert names == []


def test_a_batch_goes_on_with_what_it_has_while_a_closer_program_is_compiled(local):
    local.admit(request("r1", PROMPT, max_tokens=3, logprobs=31))
    local.advance()
    settle(local)
    wide = Kind(widths=Widths(k=32))
    local.worker.compiled._ready.intersection_update({wide})  # as if others had been dropped
    with compiled_here() as names:
        assert len(tokens(local.advance(5))["r1"]) == 3
        local.rank.leave("r1")
        assert local.advance(2)
        assert names == []
    assert local.worker.kind == wide
    assert local.compiler.busy
    settle(local)
    local.advance()
    assert local.worker.kind == Kind(widths=Widths(k=5))


def test_a_request_that_waits_can_be_taken_back(local):
    started = local.compiler.started
    local.admit(request("r1", PROMPT, logprobs=20))
    local.advance(2)
    local.rank.abort("r1")
    local.rank.leave("r1")
    assert local.worker.num_held == 0
    local.admit(request("r2", PROMPT, logprobs=3, max_tokens=2))  # of a known kind, in any slot
    assert len(tokens(local.advance(5))["r2"]) == 2
    settle(local)
    assert "r1" not in tokens(local.advance(3))
    assert local.compiler.started == started + 1


@pytest.mark.parametrize("reschedule", [False, True])
def test_a_request_that_waits_can_be_evicted(local, reschedule):
    local.admit(request("r1", PROMPT, logprobs=20))
    local.advance(2)
    slot = local.rank._slots["r1"]
    for age in (1, 0):  # of an older request first
        generation = local.rank._generations[slot] - age
        assert local.worker.num_held == 1
        local.tell(Evict(slot=slot, generation=generation, reschedule=reschedule))
    [end] = [record for record in local.advance(3) if record.request_id == "r1"]
    reason = None if reschedule else FinishReason.RECOVERY_ERROR
    assert (end.reschedule, end.finish_reason) == (reschedule, reason)
    assert local.worker.num_held == 0


def test_of_several_requests_only_the_one_ends_whose_programs_cannot_be_compiled(local, capfd):
    local.admit(request("r1", PROMPT, logprobs=20, max_tokens=2))
    local.admit(request("r2", PROMPT, logprobs=6, logit_bias=((5, 30.0),), max_tokens=2))
    local.advance()
    local.compiler.finish(RuntimeError("of both together"))
    assert {"r1", "r2"}.isdisjoint(tokens(local.advance(2)))
    assert local.worker.num_held == 2
    local.compiler.finish(RuntimeError("of r1"))
    records = local.advance()
    settle(local)
    records += local.advance(5)
    assert local.worker.num_held == 0
    ends = {record.request_id: record.finish_reason for record in records if record.finish_reason}
    assert ends == {"r1": FinishReason.RECOVERY_ERROR, "r2": FinishReason.LENGTH}
    told = tokens(records)
    assert (told["r1"], told["r2"]) == ([], [5, 5])
    assert len(told["r0"]) >= 6
    said = "request 'r1' ends: its programs cannot be compiled: RuntimeError: of r1"
    assert said in capfd.readouterr().err


def test_what_is_prepared_is_not_compiled_for_a_request():
    """For all that was named, alone and together, and for less; what else waits as ever."""
    local = Local("ngram", compiler=ByHand(), programs=kept())
    told = []
    asked = [
        SamplingParams(temperature=0.7, logprobs=4, prompt_logprobs=2),
        SamplingParams(logit_bias=((5, 30.0),)),
    ]
    with compiled_here() as names:
        local.worker.new_kinds.prepare(asked, lambda *counts: told.append(counts))
    assert {"jit(step)", "jit(score_chunk)"} <= {*names}
    assert told[-1] == (11, 11)
    assert told == sorted(told)
    with compiled_here() as names:
        for number, more in enumerate(
            [{}, {"temperature": 0.7, "logprobs": 2}, {"logit_bias": ((5, 30.0),)},
             {"temperature": 1.0, "prompt_logprobs": 2}]
        ):  # fmt: skip
            local.admit(request(f"r{number}", PROMPT, max_tokens=3, **more))
            assert len(tokens(local.advance(6))[f"r{number}"]) == 3
            local.rank.leave(f"r{number}")
        assert names == []
    local.admit(request("more", PROMPT, logprobs=20))
    assert not local.advance(2)
    assert local.worker.num_held == 1


def test_a_worker_that_runs_nothing_else_rests_until_the_programs_are_there():
    local = Local("none", compiler=ByHand(), programs=kept("none"))
    local.admit(request("r0", PROMPT, max_tokens=2))
    assert local.worker.busy
    local.worker.advance()
    assert (local.worker.busy, local.worker.num_held) == (False, 1)
    with pytest.raises(TypeError, match="KeptPrograms"):  # which can be dropped
        Local("none", compiler=ByHand())


def test_the_programs_of_the_kinds_used_last_are_kept_and_others_are_freed():
    programs, other = kept("none", most=2), Kind(widths=Widths(chosen=16))
    kinds = [Kind(widths=Widths(k=5)), Kind(widths=Widths(k=20)), PromptKind(8, Widths(k=5))]
    first, second, third = (programs.for_kind(kind).step for kind in (*kinds[:2], other))
    assert first is second is not third  # a step depends on less
    programs = kept("none", most=2)
    words = jax.numpy.arange(12)
    client = words.device.client
    gc.collect()  # what earlier tests have left
    before = len(client.live_executables())
    for kind in kinds[:2]:
        programs.for_kind(kind).leading(words, 5).block_until_ready()
        programs.be_ready(kind)
    dropped = weakref.ref(programs.for_kind(kinds[1]))
    assert len(client.live_executables()) == before + 2
    programs.for_kind(kinds[0])  # used now
    programs.for_kind(kinds[2])
    assert [programs.is_ready(kind) for kind in kinds] == [True, False, False]
    assert programs.ready == kinds[:1]
    gc.collect()
    assert dropped() is None
    assert len(client.live_executables()) == before + 1
