"""Grammars in a worker: compiled beside the steps of others, kept whatever happens to a slot."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ipc.wire import SlotState
from jax_specdec.control import Commit, Prepare
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Structured
from tests.support import letters
from tests.support.decoding import Local, random_model, request, run, tokens_of
from tests.support.letters import END, WORDS_PATTERN, text_of

PROMPT = [1, 2, 3, 1, 2, 3, 1]
GRAMMAR = {"structured": WORDS_PATTERN, "stop_token_ids": (END,), "max_tokens": 20}


def test_others_go_on_while_a_grammar_is_compiled():
    may_compile = threading.Event()

    def vocabulary():
        assert may_compile.wait(60)
        return letters.vocabulary()

    local = Local("ngram", vocabulary=vocabulary, wake=lambda: None)
    local.admit(request("free", PROMPT, max_tokens=80, logprobs=2))
    local.advance(3)
    local.admit(request("word", PROMPT, **GRAMMAR))
    local.advance(5)
    assert set(local.records) == {"free"}
    assert local.worker.num_held == 1
    may_compile.set()
    local.worker.slots[1].grammar.result()
    local.advance(12)
    assert text_of(tokens_of(local.records["word"])) in letters.WORDS
    assert len(tokens_of(local.records["free"])) > 20


def test_a_worker_that_serves_grammars_has_read_its_vocabulary():
    """Before a request comes; what cannot be read ends requests, and no worker."""
    read = []

    def vocabulary():
        read.append(1)
        return letters.vocabulary()

    local = Local("ngram", vocabulary=vocabulary)
    assert local.worker.grammars.prepare().exception() is not None or read == [1]
    local.admit(request("word", PROMPT, **GRAMMAR))
    local.drain()
    assert read == [1]
    assert text_of(tokens_of(local.records["word"])) in letters.WORDS
    without = Local("ngram", vocabulary=None)
    assert "give the worker its vocabulary" in str(without.worker.grammars.prepare().exception())


def test_an_idle_worker_waits_for_no_grammar():
    """It is told when one is there, and serves others until then: a large one, and a wrong one."""
    may_compile, woken, notes = threading.Event(), threading.Event(), []

    def vocabulary():
        assert may_compile.wait(60)
        return letters.vocabulary()

    local = Local("ngram", vocabulary=vocabulary, wake=woken.set, note=notes.append)
    wrong = GRAMMAR | {"structured": Structured("regex", "(")}
    for name, asked in (("word", GRAMMAR), ("wrong", wrong)):
        local.admit(request(name, PROMPT, **asked))
    assert local.drain() == []
    assert (local.worker.busy, local.worker.num_held, woken.is_set()) == (False, 2, False)
    local.admit(request("free", PROMPT, max_tokens=5))
    assert local.drain()[-1].finish_reason is FinishReason.LENGTH
    assert set(local.records) == {"free"}
    local.rank.leave("free")
    may_compile.set()
    assert woken.wait(60)
    for slot in local.worker.slots:
        if slot.grammar is not None:
            slot.grammar.exception()
    assert (local.worker.busy, local.worker.num_held) == (True, 0)
    local.drain()
    assert text_of(tokens_of(local.records["word"])) in letters.WORDS
    assert local.records["wrong"][-1].finish_reason is FinishReason.RECOVERY_ERROR
    (note,) = notes
    assert note.startswith("request 'wrong' (slot 1) ends: structured: the regex cannot be served")


def test_a_text_goes_on_in_its_grammar_with_other_weights():
    """The weights are the same, so the text is the same."""
    long = Structured("regex", "(ab|cde|f0|ac){4}3")
    item, texts = request("word", PROMPT, **GRAMMAR | {"structured": long}), []
    for after in (None, 1, 3):
        local = Local("mtp", vocabulary=letters.vocabulary, load=lambda *_: random_model()[0])
        local.admit(item)
        local.advance(after or 0)
        if after is not None:
            local.worker.apply(Prepare(number=1, path="x"))
            local.worker.apply(Commit(number=1, version=1))
        local.advance(20)
        records = local.records["word"]
        versions = {record.weights_version for record in records if record.num_tokens}
        assert after is None or 1 in versions
        texts.append(text_of(tokens_of(records)))
    assert texts[0] in letters.WORDS
    assert texts == texts[:1] * 3


@pytest.mark.long
def test_a_prefill_worker_hands_over_a_text_that_goes_on():
    """In its grammar: no token twice, none missing. Its drafts are verified by the first step."""
    prefill = Local("mtp", prefill_only=True, vocabulary=letters.vocabulary)
    decoding = Local("mtp", vocabulary=letters.vocabulary)
    asks = {"logprobs": 5, "draft_logprobs": True, "kept_token_ids": True}
    item = request("word", PROMPT, **GRAMMAR | asks)
    prefill.admit(item)
    (first,) = [record for record in prefill.drain() if record.num_tokens]
    (message,) = [m for m in prefill.messages if m.num_tokens.any()]
    assert message.state[0] == SlotState.PREFILL_FIRST_TOKEN
    assert message.num_tokens.tolist() == [4, 0, 0]  # with its drafts
    assert (message.num_rows.tolist(), len(message.kept_sets)) == ([1, 0, 0], 1)
    queued = prefill.rank.leave("word")
    ids = first.handover_draft_ids.tolist()
    decoding.rank.admit(replace(queued, draft_token_ids=tuple(ids)))
    rest = [record for record in decoding.drain() if record.num_tokens]
    assert (rest[0].num_drafts, rest[0].draft) == (3, None)  # they have no q to tell of
    whole = run([item], "mtp", vocabulary=letters.vocabulary).records["word"]
    records = [record for record in whole if record.num_tokens]
    assert tokens_of([first, *rest]) == tokens_of(records)
    assert text_of(tokens_of(records)) in letters.WORDS
    np.testing.assert_array_equal(first.logprobs, records[0].logprobs[:1])
    assert rest[-1].cumulative_logprob == pytest.approx(records[-1].cumulative_logprob, abs=1e-5)
