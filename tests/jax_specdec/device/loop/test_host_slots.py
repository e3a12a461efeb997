"""Decisions of the host from what it knows about the slots."""

import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.loop.host_slots import Slot, wants_one_read
from jax_specdec.requests import SamplingParams

pytestmark = pytest.mark.fast

SCALED, PROCESSED = LogprobsMode.SCALED, LogprobsMode.PROCESSED


def test_one_read_serves_greedy_requests_that_ask_for_nothing_else():
    def fused(*params):
        return wants_one_read([Slot(params=SamplingParams(**one), most_tokens=1) for one in params])

    asks, silent = {"logprobs": 3}, {}
    assert fused(asks, silent)
    assert fused(asks, asks | {"logprobs_mode": SCALED})
    assert not fused(asks, silent, silent)
    assert not fused(asks, asks | {"temperature": 0.5})
    assert not fused(asks, asks | {"logprobs_mode": PROCESSED})
    assert not fused(asks, asks | {"extra_token_ids": (3,)})
