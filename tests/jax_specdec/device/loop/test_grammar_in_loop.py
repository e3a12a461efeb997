"""Grammars through the loop: every row against a list of all words that the grammar has.

Each row's choice, logprobs and kept set are those of the model's logits without the tokens that no
word goes on with, in float64, whatever was drafted; sampled texts follow that distribution.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.model.params import named_arrays
from jax_specdec.device.model.sharding import tensor_parallel
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Structured
from tests.support import in_mode, letters, reference_model
from tests.support.changed_choice import changed_row
from tests.support.decoding import Local, random_model, request, run, tokens_of
from tests.support.expected_probs import expected_probs
from tests.support.letters import END, LETTERS, WORDS_PATTERN, masked
from tests.support.token_statistics import p_value

RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED
MODES = PROCESSED, RAW, SCALED
GRAMMAR = {"structured": WORDS_PATTERN, "stop_token_ids": (END,), "max_tokens": 20}
TEXT = np.array([LETTERS.index(one) for one in "abcdeabcdef0abcde3"])
DRAFTERS = {
    "none": "none",
    "ngram": "ngram",
    "suffix": SuffixDrafter(3, Corpus.of([np.tile(TEXT, 3)])),
    "mtp": "mtp",
}
SAMPLED = {"temperature": 1.3, "top_p": 0.95}


def asking(**more):
    """In turn greedy and sampled, in every mode, with a request that has no grammar.

    It holds a token back meanwhile, in the same masks.
    """
    prompts = [[*TEXT[:n], 3 + n] for n in range(2, 11)]
    return [
        request("free", [4, 5, 4, 5], max_tokens=30, logprobs=4, logprobs_mode=PROCESSED,
                kept_token_ids=True, min_tokens=30, stop_token_ids=(LETTERS.index("r"),)),
        *(
            request(f"r{n}", prompt, seed=n, logprobs=4 - n % 2, logprobs_mode=mode,
                    kept_token_ids=n % 3 == 0, **GRAMMAR | more, **(SAMPLED if n % 2 else {}))
            for n, (prompt, mode) in enumerate(zip(prompts, MODES * 3, strict=True))
        ),
    ]  # fmt: skip


def run_letters(requests, drafting, **options):
    return run(requests, drafting, vocabulary=letters.vocabulary, **options)


def check(result, requests):
    """Every row of every record. Returns the masked rows, and those behind an accepted draft."""
    seen = behind = 0
    for item in requests:
        params, emitted = item.params, []
        for record in result.records[item.id]:
            own = result.outputs[record.step].logits[record.slot][: record.num_tokens]
            chose = own.copy()
            for n, token in enumerate(record.token_ids.tolist()):
                if params.structured is not None:
                    chose[n] = masked(own[n], emitted)
                    seen, behind = seen + 1, behind + (n > 0)
                if params.penalizes or params.min_tokens:
                    chose[n] = changed_row(chose[n], params, item.prompt_token_ids, emitted)
                if params.temperature == 0:
                    assert token == chose[n].argmax()
                emitted.append(token)
                kept = in_mode.logprobs(chose[n], replace(params, logprobs_mode=PROCESSED))
                assert kept[token] > -np.inf
                if params.kept_token_ids:
                    assert record.kept.ids(n).tolist() == np.flatnonzero(kept > -np.inf).tolist()
            if record.num_tokens:
                in_mode.check_rows(
                    chose if params.logprobs_mode is PROCESSED else own, params, record.token_ids,
                    record.logprobs, record.topk_ids, record.token_ranks,
                )  # fmt: skip
        if params.structured is not None:
            assert emitted.pop() == END
            assert letters.text_of(emitted) in letters.WORDS
            assert record.finish_reason is FinishReason.STOP_TOKEN
    return seen, behind


@functools.cache
def found(name):
    return run_letters(asking(), DRAFTERS[name])


@pytest.mark.parametrize(
    "name",
    ["mtp", "suffix", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "none"))],
)
def test_every_row_is_chosen_and_scored_by_the_grammar(name):
    """Greedy texts are those of plain decoding: `none` has the same step without drafts.

    Where drafts are certain, so are sampled ones.
    """
    seen, behind = check(found(name), asking())
    assert seen > 60
    assert behind > {"suffix": 20, "ngram": 2, "mtp": 0, "none": -1}[name]
    for item in asking():
        if item.params.temperature == 0 or name != "mtp":
            assert found(name).token_ids(item.id) == found("suffix").token_ids(item.id)


def test_certain_drafts_that_are_forbidden_are_not_proposed_and_drawn_ones_are_rejected():
    """No draft of the suffix drafter is rejected for the grammar: all that are left may come."""
    cut = rejected = 0
    for name in ("suffix", "mtp"):
        for item in asking()[1:]:
            emitted = []
            for record in found(name).records[item.id]:
                output = found(name).outputs[record.step]
                drafts = output.drafts.token_ids[record.slot][: record.num_drafts].tolist()
                before = [*emitted]
                for draft in drafts:
                    allowed = letters.beginnings().get(letters.text_of(before), {END})
                    rejected += name == "mtp" and draft not in allowed
                    assert name == "mtp" or draft in allowed
                    if draft not in allowed or draft == END:
                        break
                    before.append(draft)
                cut += name == "suffix" and len(drafts) < 3
                emitted += record.token_ids.tolist()
    assert cut > 5
    assert rejected > 5


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 1.0}])
def test_devices_that_share_the_vocabulary_choose_as_one_does(more):
    """Masks are split as the vocabulary is, handed down or applied to a changed copy."""
    requests = asking(**more)[:6]
    split = run_letters(requests, "mtp", parallel=tensor_parallel(random_model()[1], 2))
    one = run_letters(requests, "mtp")
    check(split, requests)
    for item in requests:
        if item.params.temperature == 0:
            assert split.token_ids(item.id) == one.token_ids(item.id)


@pytest.mark.slow
def test_penalties_are_applied_behind_the_mask():
    """And a request with penalties, but without a grammar, has every token."""
    requests = [*asking(presence_penalty=1.0, frequency_penalty=-0.5)]
    seen, _ = check(run_letters(requests, "mtp"), requests)
    assert seen > 60


def test_a_text_that_goes_on_elsewhere_goes_on_in_its_grammar():
    for n, places in ((3, [2]), (4, [1, 5])):
        local = Local("mtp", vocabulary=letters.vocabulary)
        local.admit(asking()[0])
        records = local.decode_evicted(asking()[n], places)
        assert tokens_of(records) == found("mtp").token_ids(asking()[n].id)


def test_batches_without_a_grammar_run_what_they_ran_before():
    """Also after one that had: the same programs, and the same messages."""
    free = request("free", [4, 5, 4, 5], max_tokens=30, logprobs=4, logprobs_mode=PROCESSED)
    local, plain = Local("mtp", vocabulary=letters.vocabulary), Local("mtp")
    local.admit(asking()[1])
    while not any(record.finish_reason for record in local.advance()):
        pass
    local.rank.leave("r0")
    local.drain()
    assert local.chosen_apart == len(local.outputs) > 3
    apart, before = local.chosen_apart, len(local.messages)
    for one in (local, plain):
        one.admit(free)
        one.drain()
    assert local.chosen_apart == apart
    assert len(local.outputs) > apart
    pairs = zip(local.outputs[apart:], plain.outputs, strict=True)
    assert all(ours.changes is theirs.changes is None for ours, theirs in pairs)
    for ours, theirs in zip(local.messages[before:], plain.messages, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)


@pytest.mark.parametrize("structured", [("regex", "abQ"), ("regex", "(")])
def test_a_grammar_without_a_way_out_ends_its_request_alone(structured, capfd):
    """One that leads to a byte that no token has, and one that was not looked at before."""
    lost = request("lost", [1, 2, 3], **GRAMMAR | {"structured": Structured(*structured)})
    result = run_letters([*asking()[:2], lost, asking()[2]], "mtp")
    check(result, asking()[:3])
    *_, last = result.records["lost"]
    assert last.finish_reason is FinishReason.RECOVERY_ERROR
    emitted = result.token_ids("lost")
    assert letters.text_of(emitted) == ("ab" if structured[1] == "abQ" else "")
    assert "the regex cannot be served: " in capfd.readouterr().err


PROMPT = (5, 9, 5)
ANY = tuple(a + b + c for a in "bcegikmoqsuwy02" for b in "acegijkmoqsuvx1" for c in "abcdefgh")
ANY_PATTERN = Structured("regex", "[bcegikmoqsuwy02][acegijkmoqsuvx1][a-h]")


@functools.cache
def conditional(prefix, words=ANY):
    """Probabilities [V] float64 of the token after the prompt and `prefix`."""
    params, config = random_model(scale=2.0)
    row = reference_model.logits(named_arrays(params), config.to_dict(), [*PROMPT, *prefix])[-1]
    if words:
        row = masked(row, prefix, words)
    return expected_probs(row, 1.5, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    "name", ["mtp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram", "suffix"))]
)
def test_sampled_tokens_follow_the_masked_distribution(name):
    asked = {"max_tokens": 3, "structured": ANY_PATTERN, "stop_token_ids": (END,)}
    requests = [request(str(n), PROMPT, seed=n, temperature=1.5, **asked) for n in range(1500)]
    result = run_letters(
        requests, DRAFTERS[name], num_slots=300, max_length=16, model=random_model(scale=2.0)
    )
    sequences = [tuple(result.token_ids(item.id)) for item in requests]
    if name == "mtp":
        assert 20 < result.state.statistics.num_accepted < result.state.statistics.num_drafts - 20
    assert p_value(sequences, conditional) > 1e-3
    assert p_value(sequences, functools.partial(conditional, words=())) < 1e-9
