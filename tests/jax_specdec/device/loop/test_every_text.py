"""Texts of a grammar through the loop: every value against float64, and what drafts and slots do.

A grammar of few words, which a list has all of.
"""

import functools

import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.model.params import named_arrays
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Structured
from tests.support import in_mode, letters, reference_model
from tests.support.changed_choice import changed_row
from tests.support.decoding import Local, random_model, request, tokens_of
from tests.support.decoding import run as run_requests
from tests.support.expected_probs import expected_probs
from tests.support.letters import END, LETTERS, WORDS_PATTERN, masked
from tests.support.token_statistics import p_value

MODES = LogprobsMode.PROCESSED, LogprobsMode.RAW, LogprobsMode.SCALED
GRAMMAR = {"structured": WORDS_PATTERN, "stop_token_ids": (END,), "max_tokens": 20}
TEXT = [LETTERS.index(one) for one in "abcdeabcdef0abcde3"]
SUFFIX = SuffixDrafter(3)


def of_grammar(most=88, **more):
    """In turn greedy and sampled, in every mode, beside a request that has no grammar.

    It holds a token back meanwhile, in the same masks, and outlives them: all steps have one
    program.
    """
    free = {"min_tokens": most, "stop_token_ids": (LETTERS.index("r"),), "logprobs_mode": MODES[0]}
    return [
        request("free", [4, 5, 4, 5], max_tokens=most, logprobs=4, kept_token_ids=True,
                temperature=0.8, **free),
        *(
            request(f"r{n}", [*TEXT[: n + 2], 5 + n], seed=n, logprobs=4 - n % 2,
                    logprobs_mode=MODES[n % 3], kept_token_ids=n % 3 == 0, **GRAMMAR | more,
                    **({"temperature": 1.3, "top_p": 0.95} if n % 2 else {}))
            for n in range(9)
        ),
    ]  # fmt: skip


# The requests, the drafter, and the least that is to be seen.
BATCHES = {
    "mtp": (of_grammar(), "mtp", {"changed": 60, "behind": 0}),
    "suffix": (of_grammar(most=40), SUFFIX, {"changed": 60, "behind": 20}),
    "copied": (of_grammar(presence_penalty=1.0, frequency_penalty=-0.5), "mtp", {}),
}


def run(requests, drafting, **options):
    return run_requests(requests, drafting, vocabulary=letters.vocabulary, **options)


@functools.cache
def found(name):
    return run(*BATCHES[name][:2])


@pytest.mark.long
@pytest.mark.parametrize("name", ["mtp", "suffix", pytest.param("copied", marks=pytest.mark.slow)])
def test_every_value_of_a_text(name):
    requests, _, least = BATCHES[name]
    seen = in_mode.check_records(found(name), requests)
    assert all(seen[what] > number for what, number in least.items()), seen
    for item in requests[1:]:
        last, ids = found(name).records[item.id][-1], found(name).token_ids(item.id)
        assert (ids[-1], last.finish_reason) == (END, FinishReason.STOP_TOKEN)
        assert letters.text_of(ids) in letters.WORDS
    copied = [output.changed is not None for output in found(name).outputs]
    assert any(copied) == (name == "copied")


@pytest.mark.long
def test_ids_are_those_of_plain_decoding_in_a_grammar():
    """Greedy ones, whatever was drafted."""
    for item in of_grammar():
        if item.params.temperature == 0:
            assert found("mtp").token_ids(item.id) == found("suffix").token_ids(item.id)


@pytest.mark.long
def test_a_text_goes_on_elsewhere_in_its_grammar():
    """Evicted: next to the first request of its batch, it has the programs of all of them."""
    for item, places in ((of_grammar()[3], [2]), (of_grammar()[4], [1, 5])):
        local = Local("mtp", vocabulary=letters.vocabulary)
        local.admit(of_grammar(most=30)[0])
        ids = found("mtp").token_ids(item.id)
        assert tokens_of(local.decode_evicted(item, places)) == ids


def test_forbidden_drafts_are_not_proposed_or_are_rejected():
    """No draft of the suffix drafter is rejected for the grammar: all that are left may come."""
    cut = rejected = 0
    for name in ("suffix", "mtp"):
        result = found(name)
        for item in of_grammar()[1:]:
            emitted = []
            for record in result.records[item.id]:
                drafts = result.outputs[record.step].drafts.token_ids[record.slot]
                before = [*emitted]
                for draft in drafts[: record.num_drafts].tolist():
                    allowed = letters.beginnings().get(letters.text_of(before), {END})
                    rejected += name == "mtp" and draft not in allowed
                    assert name == "mtp" or draft in allowed
                    if draft not in allowed or draft == END:
                        break
                    before.append(draft)
                cut += name == "suffix" and record.num_drafts < 3
                emitted += record.token_ids.tolist()
    assert cut > 5
    assert rejected > 5


@pytest.mark.long
def test_batches_without_a_grammar_run_what_they_ran_before():
    """Also after one that had: the same programs, and the same messages."""
    free = request("free", [4, 5, 4, 5], max_tokens=30, logprobs=4, logprobs_mode=MODES[0])
    local, other = Local("mtp", vocabulary=letters.vocabulary), Local("mtp")
    for item in of_grammar(most=20)[:2]:
        local.admit(item)
    while local.rank.num_free < 3:
        for record in local.advance():
            if record.finish_reason:
                local.rank.leave(record.request_id)
    local.drain()
    assert local.chosen_apart > 3
    apart, steps, before = local.chosen_apart, len(local.outputs), len(local.messages)
    for one in (local, other):
        one.admit(free)
        one.drain()
    assert local.chosen_apart == apart
    assert len(local.outputs) > steps
    pairs = zip(local.outputs[steps:], other.outputs, strict=True)
    assert all(ours.changes is theirs.changes is None for ours, theirs in pairs)
    for ours, theirs in zip(local.messages[before:], other.messages, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)


@pytest.mark.parametrize("pattern", ["abQ", "("])
def test_a_grammar_without_a_way_out_ends_its_request_alone(pattern, capfd):
    """One that leads to a byte that no token has, and one that was not looked at before."""
    lost = request("lost", [1, 2, 3], **GRAMMAR | {"structured": Structured("regex", pattern)})
    first, second, third = asked = of_grammar(most=40)[:3]
    result = run([first, second, lost, third], "mtp")
    in_mode.check_records(result, asked)
    assert result.records["lost"][-1].finish_reason is FinishReason.RECOVERY_ERROR
    text = letters.text_of(result.token_ids("lost"))
    assert text == ("ab" if pattern == "abQ" else "")
    assert "the regex cannot be served: " in capfd.readouterr().err


PROMPT = (5, 9, 5)
ANY = tuple(a + b + c for a in "bcegikmoqsuwy02" for b in "acegijkmoqsuvx1" for c in "abcdefgh")
ANY_PATTERN = Structured("regex", "[bcegikmoqsuwy02][acegijkmoqsuvx1][a-h]")
CHANCES = {
    "temperature": 1.5, "presence_penalty": -1.0, "repetition_penalty": 0.8, "top_p": 0.95,
    "logit_bias": {2: 2.5, 4: -3.0}, "structured": ANY_PATTERN, "stop_token_ids": (END,),
}  # fmt: skip


@functools.cache
def conditional(prefix, changes=True, words=ANY):
    """Probabilities [V] float64 of the token after the prompt and `prefix`."""
    params, config = random_model(scale=2.0)
    row = reference_model.logits(named_arrays(params), config.to_dict(), [*PROMPT, *prefix])[-1]
    asks = request("r", PROMPT, max_tokens=3, **CHANCES).params
    row = masked(row, prefix, words) if words else row
    row = changed_row(row, asks, PROMPT, prefix) if changes else row
    return expected_probs(row, asks.temperature, 0, asks.top_p, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtp", "suffix"])
def test_sampled_tokens_follow_the_changed_distribution(name):
    """Of a grammar, biases and penalties, whatever was drafted."""
    requests = [request(str(n), PROMPT, seed=n, max_tokens=3, **CHANCES) for n in range(900)]
    result = run(requests, {"mtp": "mtp", "suffix": SUFFIX}[name], num_slots=300, max_length=16,
                 model=random_model(scale=2.0))  # fmt: skip
    sequences = [tuple(result.token_ids(item.id)) for item in requests]
    if name == "mtp":
        drafts = result.state.statistics
        assert 20 < drafts.num_accepted < drafts.num_drafts - 20
    assert p_value(sequences, conditional) > 1e-3
    for other in ({"changes": False}, {"words": ()}):
        assert p_value(sequences, functools.partial(conditional, **other)) < 1e-9
