"""Batches through the loop: every choice, logprob, token rank and kept set against float64.

Each row's changed logits are held against lists and dictionaries, its own against a forward pass
over the whole text. `test_every_text` has grammars, and the distribution of sampled tokens.
"""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.records.batch import FinishReason
from tests.support import in_mode
from tests.support.decoding import VOCAB, Local, mixed_requests, request, run, tokens_of

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


def asking(changes, drafts=False):
    """Each change greedy and sampled, in every mode, with every filter, K from none to V.

    The first request asks for the most and outlives others, and so does every seventh: one program
    serves all steps.
    """
    # It holds its stop tokens back; where changes are handed down, some steps have no mask.
    kinds = [changes | {"min_tokens": 80} if changes else CHANGES["bias"]]
    kinds += [*(CHANGES if changes else HANDED_DOWN).values()] * 2 + [changes] * bool(changes)
    found = []
    for number, kind in enumerate(kinds):
        n = number if number % 7 else 0
        asked = {"logprobs": [VOCAB, 5, None, 0, 20][n % 5], "logprobs_mode": MODES[n // 2 % 3]}
        asked |= {"kept_token_ids": n % 3 == 0, "draft_logprobs": drafts and n % 4 < 2}
        if asked["logprobs"] is not None:
            asked |= {"entropy": n % 2 == 0 or n % 3 == 1, "log_sum_exp": n % 3 != 2}
            asked["row_digest"] = n % 5 != 1
        if n % 5 in (0, 1):
            asked["extra_token_ids"] = (7, 2, 7)
        if n % 2 == 0:
            asked |= {"temperature": 0.7 + 0.1 * (n % 4), **FILTERS[n // 2 % 4]}
        if n == 1:
            asked["prompt_logprobs"] = 3
        asked |= {"seed": number, "max_tokens": 10 if n else 80} | (kind if n else kinds[0])
        found.append(request(f"r{number}", [*range(2 + n % 5), 5, 5], **asked))
    return found


@functools.cache
def plain():
    """Prompts around the borders of chunks, in turn greedy and sampled.

    One fills its slot to the last token, T - 1, where positions go wrong; some have one token. The
    first outlives all but that one, so that two programs serve all steps.
    """
    greedy, sampled = mixed_requests(), mixed_requests(temperature=0.8)
    return [
        request("first", [5, 5], max_tokens=66, temperature=0.8, logprobs=20),
        *((greedy, sampled)[n % 2][n] for n in range(len(greedy))),
        *(request(f"one{n}", [3], max_tokens=1, logprobs=0) for n in range(4)),
        request("full", np.arange(60) % VOCAB, max_tokens=36, logprobs=4),
    ]


# The requests, the drafter, and the least that is to be seen.
BATCHES = {
    "copied": (
        asking(ALL, True),
        "mtp",
        {"changed": 100, "behind": 15, "drafts": 30, "digests": 30},
    ),
    "handed down": (asking({}, True), "ngram", {"changed": 60, "behind": 5}),
    "plain, mtp": (plain(), "mtp", {"rows": 60, "accepted": 10}),
    "plain, ngram": (plain(), "ngram", {"rows": 60, "accepted": 10}),
    "plain, suffix": (plain(), SuffixDrafter(3), {"rows": 60, "accepted": 10}),
    "plain, none": (plain(), "none", {"rows": 60}),
}


@functools.cache
def found(name):
    return run(*BATCHES[name][:2])


MARKS = {"copied": "long", "plain, ngram": "slow", "plain, suffix": "slow"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[getattr(pytest.mark, MARKS[n])] if n in MARKS else [])
        for n in BATCHES
    ],
)
def test_every_value(name):
    requests, _, least = BATCHES[name]
    seen = in_mode.check_records(found(name), requests)
    assert all(seen[what] > number for what, number in least.items()), seen
    if name == "copied":
        sizes = {int(what.split()[1]) for what in seen if what.startswith("kept")}
        assert {1, VOCAB} < sizes
        assert len(sizes) > 4
    for item in requests if name.startswith("plain") else ():
        last, count = found(name).records[item.id][-1], len(found(name).token_ids(item.id))
        assert (count, last.finish_reason) == (item.params.max_tokens, FinishReason.LENGTH)
    copied = [output.changed is not None for output in found(name).outputs]
    assert any(copied) == name.endswith("copied")
    for message in found(name).messages:  # each has the words of what was asked for and no more
        if message.kind is Kind.TARGET:
            np.testing.assert_array_equal(
                message.num_rows, np.where(message.columns > 0, message.num_tokens, 0)
            )
            rows = message.num_tokens * message.kept
            assert len(message.kept_sets or ()) == rows.sum()


@pytest.mark.slow
def test_a_row_off_by_one_would_be_noticed():
    """The control of the check above."""
    result = run(plain(), "mtp", distort=lambda x: x._replace(logits=jnp.roll(x.logits, 1, axis=1)))
    with pytest.raises(AssertionError):
        in_mode.check_records(result, plain())


@pytest.mark.parametrize(
    "name", ["mtp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ngram", "suffix"))]
)
def test_ids_are_those_of_plain_decoding(name):
    """Greedy ones whatever was drafted; sampled ones too where drafts are certain."""
    for item in plain():
        if item.params.temperature == 0 or name != "mtp":
            ids = found(f"plain, {name}").token_ids(item.id)
            assert ids == found("plain, none").token_ids(item.id)


def test_masks_and_biases_alone_are_handed_down():
    """In two programs: the first request asks for the most, except a mask."""
    changes = [output.changes for output in found("handed down").outputs]
    assert {one.allowed is None for one in changes if one is not None} == {True, False}


def test_a_step_sends_one_target_message_with_every_slot():
    """Steps are numbered one by one; `running` falls with the last request."""
    result = found("plain, mtp")
    assert [message.step for message in result.messages] == [*range(len(result.messages))]
    assert {message.num_slots for message in result.messages} == {3}
    end = max(records[-1].step for records in result.records.values())
    running = [message.running for message in result.messages]
    assert running == [message.step < end for message in result.messages]
    # A long prompt is run between the steps of others.
    assert any((message.state == SlotState.NOTHING).any() for message in result.messages)
    assert result.messages[-1].generation.max() > 1


def test_draft_messages_follow_their_target_where_a_request_asks():
    messages = [one for one in found("copied").messages if one.kind is not Kind.PROMPT]
    kinds = [(message.kind, message.step) for message in messages]
    followed = [message.step for message in messages if message.draft_follows]
    assert [step for kind, step in kinds if kind is Kind.DRAFT] == followed != []
    for at, (kind, step) in enumerate(kinds):
        assert kind is Kind.TARGET or kinds[at - 1] == (Kind.TARGET, step)
    for item in BATCHES["copied"][0]:
        for record in found("copied").records[item.id]:
            sent = item.params.draft_logprobs and record.num_drafts > 0
            assert (record.draft is not None) == sent
    for name in ("handed down", "plain, mtp", "plain, none"):  # nobody asks, or nothing is drawn
        assert Kind.DRAFT not in {message.kind for message in found(name).messages}
    asked = [item.id for item in BATCHES["handed down"][0] if item.params.draft_logprobs]
    assert any(record.num_drafts for id in asked for record in found("handed down").records[id])


def first_of_copied():
    """It gives its batch the programs of all, and ends sooner."""
    first = BATCHES["copied"][0][0]
    return replace(first, params=replace(first.params, min_tokens=40, max_tokens=40))


def test_tokens_do_not_depend_on_the_company():
    """Beside one other or many, in any slot: the same tokens, and logprobs bit for bit."""
    _, *others = BATCHES["copied"][0]
    for item in (others[0], others[5], others[10]):
        alone = run([item, first_of_copied()], "mtp")
        assert alone.token_ids(item.id) == found("copied").token_ids(item.id)
        both = alone.records[item.id], found("copied").records[item.id]
        for ours, theirs in zip(*both, strict=True):
            np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


def test_a_text_that_goes_on_elsewhere_goes_on_as_it_would_have():
    """Evicted: what was emitted counts as emitted.

    Next to the first request of its batch, it has the programs of all of them.
    """
    counted = {"min_tokens": 14, "stop_token_ids": STOPS[2:], "presence_penalty": -0.5}
    long = request("r", [1, 2, 3], max_tokens=24, **ALL | counted)
    ids = run([first_of_copied(), long], "mtp").token_ids("r")
    local = Local("mtp")
    local.admit(first_of_copied())
    assert tokens_of(local.decode_evicted(long, [4, 12])) == ids
    assert not {*ids[:14]} & {*STOPS[2:]}


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
