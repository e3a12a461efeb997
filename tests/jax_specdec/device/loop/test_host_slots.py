"""Decisions of the host from what it knows about the slots."""

from dataclasses import replace

import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.loop.host_slots import (
    Slot,
    all_options,
    draft_bound,
    for_prompt,
    prompt_bound,
    reads_once,
    target_bound,
    widths_of_slots,
)
from jax_specdec.device.messages.logit_changes import changes_size
from jax_specdec.requests import SamplingParams

pytestmark = pytest.mark.fast

SCALED, PROCESSED = LogprobsMode.SCALED, LogprobsMode.PROCESSED
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


def test_when_logprobs_take_what_verification_has_read():
    """On a GPU where all slots are greedy, elsewhere where one samples; if half of them ask."""

    def where(*params):
        taken = [Slot(params=SamplingParams(**one), most_tokens=1) for one in params]
        once = [reads_once([*taken, Slot()], on_gpu) for on_gpu in (False, True)]
        return once.index(True) if any(once) else None

    asks, silent, sampled = {"logprobs": 3}, {}, {"temperature": 0.5}
    elsewhere, on_gpu = range(2)
    assert where(asks, silent) == on_gpu
    assert where(asks, asks | sampled) == elsewhere
    for other in ({"logprobs_mode": PROCESSED}, {"extra_token_ids": (3,)}):
        assert where(asks, asks | other) == on_gpu
        assert where(asks, asks | sampled | other) == elsewhere
    for change in CHANGES:
        has_penalties = any("penalty" in name for name in change)
        assert where(asks, asks | change) == (None if has_penalties else on_gpu)
    for nothing in CHANGES_NOTHING:
        assert where(asks, asks | nothing) == on_gpu
    assert where(asks, silent, sampled) is None  # too few ask
    assert where() is None


def slots_of(*params):
    return [
        Slot(params=SamplingParams(**one), most_tokens=1, prompt_length=5 + n, num_emitted=n)
        for n, one in enumerate(params)
    ]


def changes_of(slots):
    size = changes_size([slot.params for slot in slots])
    return all_options(slots, widths_of_slots(slots, 2000), size).changes


def test_a_batch_that_changes_nothing_has_no_changes():
    """Then its step is the program that knows of none."""
    assert changes_of([*slots_of(*CHANGES_NOTHING), Slot()]) is None
    for change in CHANGES:
        assert changes_of([*slots_of(change), Slot()]) is not None


def test_what_slots_change_by_hand():
    found = changes_of([Slot(), *slots_of(*CHANGES[::-1])])
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


@pytest.mark.parametrize(("count", "width"), [(0, 0), (1, 16), (16, 16), (17, 128), (1024, 1024)])
def test_tables_of_named_tokens_have_few_widths(count, width):
    biased = SamplingParams(presence_penalty=1.0, logit_bias=dict.fromkeys(range(count), 1.0))
    held = SamplingParams(presence_penalty=1.0, min_tokens=1, stop_token_ids=range(count))
    for params in (biased, held):
        slot = Slot(params=params, most_tokens=1, prompt_length=1)
        found = changes_of([slot])
        assert found.bias_ids.shape == (1, width)
        assert found.held_ids.shape == (1, width if params is held else 0)


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
    asked = SamplingParams(**params)
    assert asked.most_kept == most
    kept, plain = (
        Slot(params=one, most_tokens=3) for one in (asked, replace(asked, kept_token_ids=False))
    )
    room = 0 if most is None else 3 * (2 + most)
    assert target_bound([kept, plain]) == target_bound([plain, plain]) + room
    drafting = replace(kept, params=replace(asked, draft_logprobs=True))
    without = replace(plain, params=replace(plain.params, draft_logprobs=True))
    assert draft_bound([drafting]) == draft_bound([without])
    scored = replace(asked, prompt_logprobs=2)
    assert prompt_bound([kept], for_prompt(replace(kept, params=scored)), 9) == prompt_bound(
        [plain], for_prompt(replace(plain, params=replace(scored, kept_token_ids=False))), 9
    )
