"""Batches through the loop: every choice, logprob, token rank and kept set against float64.

Each row's changed logits are held against lists and dictionaries, its own against a forward pass
over the whole text, and sampled tokens against their exact distribution.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.model.params import named_arrays
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Structured
from tests.support import in_mode, letters, reference_model
from tests.support.changed_choice import changed_row
from tests.support.decoding import VOCAB, Local, mixed_requests, random_model, request, tokens_of
from tests.support.decoding import run as run_requests
from tests.support.expected_probs import expected_probs
from tests.support.letters import END, LETTERS, WORDS_PATTERN, masked
from tests.support.token_statistics import p_value

RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED
MODES = PROCESSED, RAW, SCALED
FILTERS = ({"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.95}, {})
STOPS = tuple(range(0, VOCAB, 3))  # the model would soon choose one of them
HANDED_DOWN = {
    "bias": {"logit_bias": {3: 4.0, 4: -6.0, 31: 0.5}},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": STOPS},
    "both": {"logit_bias": {3: 4.0}, "min_tokens": 4, "stop_token_ids": STOPS[1:]},
    "nothing": {},
}
CHANGES = HANDED_DOWN | {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.4},  # tokens repeat themselves, and drafts are accepted
    "repetition": {"repetition_penalty": 1.4},
}
ALL = {
    "presence_penalty": -1.0, "frequency_penalty": 0.3, "repetition_penalty": 0.8, "min_tokens": 4,
    "logit_bias": {3: 2.5, 4: -6.0, 5: 1.0}, "stop_token_ids": STOPS[1:],
}  # fmt: skip
GRAMMAR = {"structured": WORDS_PATTERN, "stop_token_ids": (END,), "max_tokens": 20}
TEXT = np.array([LETTERS.index(one) for one in "abcdeabcdef0abcde3"])
SUFFIX = SuffixDrafter(3, Corpus.of([np.tile(TEXT, 3)]))


def asking(changes, drafts=False):
    """Each change greedy and sampled, in every mode, with every filter, K from none to V.

    The first request outlives the others and asks for the most: one program serves all steps.
    """
    kinds = [changes | {"stop_token_ids": ()} if changes else CHANGES["bias"]]
    kinds += [*(CHANGES if changes else HANDED_DOWN).values()] * 2 + [changes] * bool(changes)
    found = []
    for n, kind in enumerate(kinds):
        asked = {"logprobs": [VOCAB, 5, None, 0, 20][n % 5], "logprobs_mode": MODES[n // 2 % 3]}
        asked |= {"kept_token_ids": n % 3 == 0, "draft_logprobs": drafts and n % 4 < 2}
        if n % 5 in (0, 1):
            asked["extra_token_ids"] = (7, 2, 7)
        if n % 2 == 0:
            asked |= {"temperature": 0.7 + 0.1 * (n % 4), **FILTERS[n // 2 % 4]}
        if n == 1:
            asked["prompt_logprobs"] = 3
        most = {"max_tokens": 80 if n == 0 else 10}
        found.append(request(f"r{n}", [*range(2 + n % 5), 5, 5], seed=n, **most | asked | kind))
    return found


def of_grammar(**more):
    """In turn greedy and sampled, in every mode, beside a request that has no grammar.

    It holds a token back meanwhile, in the same masks.
    """
    free = {"min_tokens": 30, "stop_token_ids": (LETTERS.index("r"),), "logprobs_mode": PROCESSED}
    return [
        request("free", [4, 5, 4, 5], max_tokens=30, logprobs=4, kept_token_ids=True, **free),
        *(
            request(f"r{n}", [*TEXT[: n + 2], 5 + n], seed=n, logprobs=4 - n % 2,
                    logprobs_mode=MODES[n % 3], kept_token_ids=n % 3 == 0, **GRAMMAR | more,
                    **({"temperature": 1.3, "top_p": 0.95} if n % 2 else {}))
            for n in range(9)
        ),
    ]  # fmt: skip


@functools.cache
def plain():
    """Prompts around the borders of chunks, in turn greedy and sampled.

    One fills its slot to the last token, T - 1, where positions go wrong; some have one token.
    """
    greedy, sampled = mixed_requests(), mixed_requests(temperature=0.8)
    return [
        *((greedy, sampled)[n % 2][n] for n in range(len(greedy))),
        request("full", np.arange(60) % VOCAB, max_tokens=36, logprobs=4),
        *(request(f"one{n}", [3], max_tokens=1, logprobs=0) for n in range(4)),
    ]


# The requests, the drafter, and the least that is to be seen.
BATCHES = {
    "copied": (asking(ALL, True), "mtp", {"changed": 100, "behind": 15, "drafts": 30}),
    "handed down": (asking({}), "ngram", {"changed": 60, "behind": 5}),
    "grammar, mtp": (of_grammar(), "mtp", {"changed": 60, "behind": 0}),
    "grammar, suffix": (of_grammar(), SUFFIX, {"changed": 60, "behind": 20}),
    "grammar, copied": (of_grammar(presence_penalty=1.0, frequency_penalty=-0.5), "mtp", {}),
    "plain, mtp": (plain(), "mtp", {"rows": 60, "accepted": 10}),
    "plain, ngram": (plain(), "ngram", {"rows": 60, "accepted": 10}),
    "plain, suffix": (plain(), SuffixDrafter(3), {"rows": 60, "accepted": 10}),
    "plain, none": (plain(), "none", {"rows": 60}),
}


def run(requests, drafting, **options):
    return run_requests(requests, drafting, vocabulary=letters.vocabulary, **options)


@functools.cache
def found(name):
    return run(*BATCHES[name][:2])


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one == "grammar, copied")) for one in BATCHES],
)
def test_every_value(name):
    requests, _, least = BATCHES[name]
    seen = in_mode.check_records(found(name), requests)
    assert all(seen[what] > number for what, number in least.items()), seen
    for item in requests:
        last, ids = found(name).records[item.id][-1], found(name).token_ids(item.id)
        if item.params.structured is not None:
            assert (ids[-1], last.finish_reason) == (END, FinishReason.STOP_TOKEN)
            assert letters.text_of(ids) in letters.WORDS
        elif name.startswith("plain"):
            assert (len(ids), last.finish_reason) == (item.params.max_tokens, FinishReason.LENGTH)
    copied = [output.changed is not None for output in found(name).outputs]
    assert any(copied) == name.endswith("copied")
    for message in found(name).messages:  # each has the words of what was asked for and no more
        if message.kind is Kind.TARGET:
            np.testing.assert_array_equal(
                message.num_rows, np.where(message.columns > 0, message.num_tokens, 0)
            )
            rows = message.num_tokens * message.kept
            assert len(message.kept_sets or ()) == rows.sum()


def test_a_row_off_by_one_would_be_noticed():
    """The control of the check above."""

    def shifted(output):
        return output._replace(logits=jnp.roll(output.logits, 1, axis=1))

    result = run(plain(), "mtp", distort=shifted)
    with pytest.raises(AssertionError):
        in_mode.check_records(result, plain())


def test_kept_sets_have_many_sizes():
    seen = in_mode.check_records(found("copied"), BATCHES["copied"][0])
    sizes = {int(what.split()[1]) for what in seen if what.startswith("kept")}
    assert {1, VOCAB} < sizes
    assert len(sizes) > 4


def test_ids_are_those_of_plain_decoding():
    """Greedy ones whatever was drafted; sampled ones too where drafts are certain."""
    for name in ("mtp", "ngram", "suffix"):
        for item in plain():
            if item.params.temperature == 0 or name != "mtp":
                ids = found(f"plain, {name}").token_ids(item.id)
                assert ids == found("plain, none").token_ids(item.id)
    for item in of_grammar():
        if item.params.temperature == 0:
            ids = found("grammar, mtp").token_ids(item.id)
            assert ids == found("grammar, suffix").token_ids(item.id)


def test_masks_and_biases_alone_are_handed_down():
    """In two programs: the first request asks for the most, but for a mask."""
    changes = [output.changes for output in found("handed down").outputs]
    assert {one.allowed is None for one in changes if one is not None} == {True, False}


def test_a_step_sends_one_target_message_with_every_slot():
    """Steps are numbered one by one; `running` falls with the last request."""
    result = found("plain, ngram")
    assert [message.step for message in result.messages] == [*range(len(result.messages))]
    assert {message.num_slots for message in result.messages} == {3}
    end = max(records[-1].step for records in result.records.values())
    running = [message.running for message in result.messages]
    assert running == [message.step < end for message in result.messages]
    # A long prompt is run between the steps of others.
    assert any((message.state == SlotState.NOTHING).any() for message in result.messages)
    assert result.messages[-1].generation.max() > 1


def test_draft_messages_follow_their_target_where_a_request_asks():
    kinds = [(message.kind, message.step) for message in found("copied").messages]
    kinds = [kind for kind in kinds if kind[0] is not Kind.PROMPT]
    followed = [message.step for message in found("copied").messages if message.draft_follows]
    assert [step for kind, step in kinds if kind is Kind.DRAFT] == followed != []
    for at, (kind, step) in enumerate(kinds):
        assert kind is Kind.TARGET or kinds[at - 1] == (Kind.TARGET, step)
    for item in BATCHES["copied"][0]:
        for record in found("copied").records[item.id]:
            sent = item.params.draft_logprobs and record.num_drafts > 0
            assert (record.draft is not None) == sent
    for name in ("handed down", "plain, mtp", "plain, none"):  # nobody asks, or nothing is drawn
        assert Kind.DRAFT not in {message.kind for message in found(name).messages}
    asking_in_vain = [request("r", [1, 2, 1, 2], max_tokens=8, draft_logprobs=True)]
    result = run(asking_in_vain, "ngram")
    assert {message.kind for message in result.messages} == {Kind.TARGET}
    assert any(record.num_drafts for record in result.records["r"])


def test_tokens_do_not_depend_on_the_company():
    """Beside one other or many, in any slot: the same tokens, and logprobs bit for bit."""
    first, *others = BATCHES["copied"][0]
    for item in (others[0], others[5], others[10]):
        alone = run([item, first], "mtp")
        assert alone.token_ids(item.id) == found("copied").token_ids(item.id)
        both = alone.records[item.id], found("copied").records[item.id]
        for ours, theirs in zip(*both, strict=True):
            np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


@pytest.mark.slow
def test_a_request_without_changes_gets_the_same_beside_those_that_have_some():
    """Alone, it runs the program that knows of none."""
    (item,) = [one for one in BATCHES["copied"][0][:8] if not one.params.changes_logits]
    alone = run([item], "mtp")
    assert all(output.changed is output.changes is None for output in alone.outputs)
    assert alone.token_ids(item.id) == found("copied").token_ids(item.id)


def test_a_text_that_goes_on_elsewhere_goes_on_as_it_would_have():
    """Evicted: its grammar is where it was, and what was emitted counts as emitted.

    Next to the first request of its batch, it has the programs of all of them.
    """
    counted = {"min_tokens": 14, "stop_token_ids": STOPS[2:], "presence_penalty": -0.5}
    long = request("r", [1, 2, 3], max_tokens=24, **ALL | counted)
    first, expected = BATCHES["copied"][0][0], found("grammar, mtp")
    texts = [(long, [4, 12], first, run([first, long], "mtp").token_ids("r"))]
    for item, places in ((of_grammar()[3], [2]), (of_grammar()[4], [1, 5])):
        texts.append((item, places, of_grammar()[0], expected.token_ids(item.id)))
    for item, places, beside, ids in texts:
        local = Local("mtp", vocabulary=letters.vocabulary)
        local.admit(beside)
        assert tokens_of(local.decode_evicted(item, places)) == ids
    assert not {*texts[0][3][:14]} & {*STOPS[2:]}


def test_certain_drafts_that_are_forbidden_are_not_proposed_and_drawn_ones_are_rejected():
    """No draft of the suffix drafter is rejected for the grammar: all that are left may come."""
    cut = rejected = 0
    for name in ("suffix", "mtp"):
        result = found(f"grammar, {name}")
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


def test_batches_without_a_grammar_run_what_they_ran_before():
    """Also after one that had: the same programs, and the same messages."""
    free = request("free", [4, 5, 4, 5], max_tokens=30, logprobs=4, logprobs_mode=PROCESSED)
    local, other = Local("mtp", vocabulary=letters.vocabulary), Local("mtp")
    local.admit(of_grammar()[1])
    while not any(record.finish_reason for record in local.advance()):
        pass
    local.rank.leave("r0")
    local.drain()
    assert local.chosen_apart == len(local.outputs) > 3
    apart, before = local.chosen_apart, len(local.messages)
    for one in (local, other):
        one.admit(free)
        one.drain()
    assert local.chosen_apart == apart < len(local.outputs)
    pairs = zip(local.outputs[apart:], other.outputs, strict=True)
    assert all(ours.changes is theirs.changes is None for ours, theirs in pairs)
    for ours, theirs in zip(local.messages[before:], other.messages, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)


@pytest.mark.parametrize("pattern", ["abQ", "("])
def test_a_grammar_without_a_way_out_ends_its_request_alone(pattern, capfd):
    """One that leads to a byte that no token has, and one that was not looked at before."""
    lost = request("lost", [1, 2, 3], **GRAMMAR | {"structured": Structured("regex", pattern)})
    first, second, third = of_grammar()[:3]
    result = run([first, second, lost, third], "mtp")
    in_mode.check_records(result, of_grammar()[:3])
    assert result.records["lost"][-1].finish_reason is FinishReason.RECOVERY_ERROR
    text = letters.text_of(result.token_ids("lost"))
    assert text == ("ab" if pattern == "abQ" else "")
    assert "the regex cannot be served: " in capfd.readouterr().err


@pytest.mark.slow
def test_a_row_of_which_nothing_is_left_ends_the_step():
    """Every token may not come yet: the lowest one comes, with the model's own logprob."""
    item = request("r", [1, 2, 3], max_tokens=9, min_tokens=3, logprobs=0, presence_penalty=1.0,
                   stop_token_ids=range(VOCAB))  # fmt: skip
    (record,) = [one for one in run([item], "ngram").records["r"] if one.num_tokens]
    assert record.token_ids.tolist() == [0]
    assert record.finish_reason is FinishReason.STOP_TOKEN
    assert np.isfinite(record.logprobs).all()
    assert record.valid.all()


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


@pytest.mark.parametrize("name", ["mtp", pytest.param("suffix", marks=pytest.mark.slow)])
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
