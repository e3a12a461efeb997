"""Decisions of the host from what it knows about the slots."""

from dataclasses import replace

import numpy as np
import pytest

from ipc import wire
from ipc.wire import LogprobsMode
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.kinds import StepKind
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.device.messages.logit_changes import changes_size
from jax_specdec.requests import SamplingParams

CHANGES = (
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {7: 0.5}},
    {"min_tokens": 2, "stop_token_ids": (3,)},
)
CHANGES_NOTHING = (
    {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}},
    {"min_tokens": 2, "stop_sequences": [(3,)]},
    {"min_tokens": 0, "stop_token_ids": (3,)},
)


def slot(most_tokens=1, prefill_at=None, **params):
    return host_slots.Slot(
        params=SamplingParams(**params), most_tokens=most_tokens, prefill_at=prefill_at
    )


def slots_of(*params):
    taken = enumerate(params)
    return [replace(slot(**one), prompt_length=5 + n, num_emitted=n) for n, one in taken]


def changes_of(slots):
    size = changes_size([slot.params for slot in slots])
    return host_slots.all_options(slots, host_slots.widths_of_slots(slots, 2000), size).changes


def test_a_batch_that_changes_nothing_has_no_changes():
    """Then its step is the program that knows of none."""
    assert changes_of([*slots_of(*CHANGES_NOTHING), host_slots.Slot()]) is None
    for change in CHANGES:
        assert changes_of([*slots_of(change), host_slots.Slot()]) is not None


def test_what_slots_change_by_hand():
    found = changes_of([host_slots.Slot(), *slots_of(*CHANGES[::-1])])
    penalties = found.penalties
    assert penalties.repetition.tolist() == np.float32([1, 1, 1, 1.1, 1, 1]).tolist()
    assert penalties.frequency.tolist() == np.float32([0, 0, 0, 0, -0.1, 0]).tolist()
    assert penalties.presence.tolist() == np.float32([0, 0, 0, 0, 0, 0.1]).tolist()
    assert penalties.output_start.tolist() == [0, 5, 5, 5, 5, 5]
    assert changes_of(slots_of(*CHANGES[3:])).penalties is None
    assert found.held_until.tolist()[:2] == [0, 7]  # the prompt's length and min_tokens
    assert found.held_ids.shape == found.bias_ids.shape == found.bias.shape == (6, 16)
    assert found.held_ids[:, 0].tolist() == [-1, 3, -1, -1, -1, -1]
    assert found.bias_ids[:, 0].tolist() == [-1, -1, 7, -1, -1, -1]
    assert found.bias[:, 0].tolist() == [0, 0, 0.5, 0, 0, 0]
    assert (found.bias_ids[:, 1:] == -1).all()


@pytest.mark.parametrize(
    ("count", "width"), [(0, 0), (1, 16), (17, 300), (301, 1024), (1024, 1024)]
)
def test_tables_of_named_tokens_have_few_widths(count, width):
    biased = {"logit_bias": dict.fromkeys(range(count), 1.0)}
    for params in (biased, {"min_tokens": 1, "stop_token_ids": range(count)}):
        found = changes_of(slots_of({"presence_penalty": 1.0} | params))
        assert found.bias_ids.shape == (1, width)
        assert found.held_ids.shape == (1, 0 if params is biased else width)


@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({}, None),
        ({"kept_token_ids": True}, 1),  # greedy
        ({"kept_token_ids": True, "temperature": 1.0}, 1024),
        ({"kept_token_ids": True, "temperature": 1.0, "top_k": 7, "top_p": 0.5}, 7),
        ({"kept_token_ids": True, "temperature": 1.0, "top_k": 5000}, 1024),
    ],
)
def test_kept_sets_have_room_in_target_messages_alone(params, most):
    asks = {"draft_logprobs": True, "prompt_logprobs": 2} | params
    kept, plain = slot(3, **asks), slot(3, **asks | {"kept_token_ids": False})
    assert kept.params.most_kept == most
    room = 0 if most is None else 3 * (2 + most)
    assert host_slots.target_bound([kept, plain]) == host_slots.target_bound([plain, plain]) + room
    assert host_slots.draft_bound([kept]) == host_slots.draft_bound([plain])
    first, second = (
        host_slots.prompt_bound([one], host_slots.for_prompt(one), 9) for one in (kept, plain)
    )
    assert first == second


def test_the_bounds_of_the_next_messages_by_hand():
    batch = [
        slot(4, logprobs=2, draft_logprobs=True),
        slot(3, logprobs=0, extra_token_ids=(1, 2)),
        slot(4, prefill_at=8, logprobs=20, draft_logprobs=True),  # nothing before its prompt is run
        slot(2, draft_logprobs=True),
        host_slots.Slot(),
    ]
    fixed = wire.HEADER_WORDS + 5 * wire.SLOT_WORDS
    # A token's id, its rank, K + 1 logprobs, K ids, and the chosen ones.
    assert host_slots.target_bound(batch) == fixed + 4 * (1 + 6) + 3 * (1 + 2 + 2) + 2
    assert host_slots.draft_bound(batch) == fixed + 3 * (1 + 6) + 1


# Kinds of batches, and which kind's programs serve which batch -----------------------------------

SAMPLED, ASKS, BIAS = {"temperature": 0.5}, {"logprobs": 3}, {"logit_bias": ((1, 2.0),)}


def kind(*params, draws=True):
    return StepKind.of_slots([*slots_of(*params), host_slots.Slot(generation=7)], 300, draws=draws)


def serves(one, *params):
    return one.serves(kind(*params))


WIDER = [
    (ASKS | {"logprobs": 6}, ASKS),
    (ASKS | {"logprobs": 0}, {}),
    (ASKS | {"extra_token_ids": (1,)}, ASKS),
    (ASKS | {"extra_token_ids": tuple(range(17))}, ASKS | {"extra_token_ids": (1,)}),
    (SAMPLED | ASKS | {"logprobs_mode": LogprobsMode.PROCESSED}, SAMPLED | ASKS),
    (SAMPLED, {}),
    (SAMPLED | {"kept_token_ids": True}, SAMPLED),
    (ASKS | {"draft_logprobs": True, "extra_token_ids": (1,)}, ASKS | {"extra_token_ids": (1,)}),
    (BIAS, {}),
    ({"logit_bias": tuple((i, 1.0) for i in range(17))}, BIAS),
    (BIAS | {"presence_penalty": 1.0}, BIAS),
    (BIAS | {"min_tokens": 2, "stop_token_ids": (9,)}, BIAS),
]


@pytest.mark.parametrize(("more", "less"), WIDER)
def test_what_serves_more_serves_less(more, less):
    wide, narrow = kind(more), kind(less)
    assert wide != narrow
    assert serves(wide, more)
    assert serves(wide, less)
    assert not serves(narrow, more)
    assert serves(narrow, less)


def test_without_drawn_drafts_there_are_fewer_kinds():
    assert kind(ASKS) == StepKind(widths=Widths(k=5))
    assert not kind(ASKS | {"draft_logprobs": True}, draws=False).reports_drafts
