"""Decisions of the host from what it knows about the slots."""

from dataclasses import replace

import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.loop.host_slots import (
    OneRead,
    Slot,
    draft_bound,
    for_prompt,
    prompt_bound,
    target_bound,
    wants_one_read,
)
from jax_specdec.requests import SamplingParams

pytestmark = pytest.mark.fast

SCALED, PROCESSED = LogprobsMode.SCALED, LogprobsMode.PROCESSED


def test_what_one_read_serves():
    def served(*params):
        return wants_one_read([Slot(params=SamplingParams(**one), most_tokens=1) for one in params])

    asks, silent, sampled = {"logprobs": 3}, {}, {"temperature": 0.5}
    assert served(asks, silent) is OneRead.GREEDY
    assert served(asks, asks | {"logprobs_mode": SCALED}) is OneRead.GREEDY
    assert served(asks, asks | sampled) is OneRead.SAMPLED
    assert served(asks, sampled | {"logprobs_mode": PROCESSED}) is OneRead.SAMPLED  # none asked
    for other in (
        {"logprobs_mode": PROCESSED},
        {"extra_token_ids": (3,)},
        sampled | {"logprobs_mode": SCALED},
    ):
        assert served(asks, asks | other) is OneRead.NOTHING
    assert served(asks, silent, silent) is OneRead.NOTHING  # too few ask
    assert served() is OneRead.NOTHING


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
