"""Decisions of the host from what it knows about the slots."""

import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.loop.host_slots import OneRead, Slot, wants_one_read
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
