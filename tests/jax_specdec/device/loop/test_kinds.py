"""Kinds of batches, and which kind's programs serve which batch."""

import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.kinds import Kind
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.requests import SamplingParams

pytestmark = pytest.mark.fast
SAMPLED = {"temperature": 0.5}
ASKS = {"logprobs": 3}


def slots(*params):
    taken = [Slot(params=SamplingParams(**one), most_tokens=4) for one in params]
    return [*taken, Slot(generation=7)]


def kind(*params, **options):
    return Kind.of_slots(slots(*params), 300, **{"draws": True} | options)


def serves(one, *params):
    exact = Kind.of_slots(slots(*params), 300, draws=True)
    return one.serves(exact, slots(*params))


WIDER = [
    (ASKS | {"logprobs": 6}, ASKS),
    (ASKS | {"logprobs": 0}, {}),
    (ASKS | {"extra_token_ids": (1,)}, ASKS),
    (ASKS | {"extra_token_ids": tuple(range(17))}, ASKS | {"extra_token_ids": (1,)}),
    (SAMPLED | ASKS | {"logprobs_mode": LogprobsMode.PROCESSED}, SAMPLED | ASKS),
    (SAMPLED, {}),
    (SAMPLED | {"kept_token_ids": True}, SAMPLED),
    (ASKS | {"draft_logprobs": True, "extra_token_ids": (1,)}, ASKS | {"extra_token_ids": (1,)}),
    ({"logit_bias": ((1, 2.0),)}, {}),
    ({"logit_bias": tuple((i, 1.0) for i in range(17))}, {"logit_bias": ((1, 2.0),)}),
    ({"presence_penalty": 1.0, "logit_bias": ((1, 2.0),)}, {"logit_bias": ((1, 2.0),)}),
    (
        {"min_tokens": 2, "stop_token_ids": (9,), "logit_bias": ((1, 2.0),)},
        {"logit_bias": ((1, 2.0),)},
    ),
]


@pytest.mark.parametrize(("more", "less"), WIDER)
def test_what_serves_more_serves_less_and_not_the_other_way_round(more, less):
    wide, narrow = kind(more), kind(less)
    assert wide != narrow
    assert serves(wide, more)
    assert serves(wide, less)
    assert not serves(narrow, more)
    assert serves(narrow, less)
    assert narrow.cost < wide.cost


def test_programs_of_one_read_serve_batches_of_which_few_ask_and_greedy_ones():
    once, few = kind(ASKS | SAMPLED), (ASKS, {}, {})
    assert once.reads_once
    assert not kind(*few).reads_once
    assert serves(once, *few)
    assert serves(once, ASKS)


def test_without_drawn_drafts_there_are_fewer_kinds():
    assert kind(ASKS) == Kind(widths=Widths(k=5))
    assert not kind(ASKS | {"draft_logprobs": True}, draws=False).reports_drafts


def test_the_cheapest_kind_comes_first():
    params = [{}, ASKS, {"logprobs": 100}, {"presence_penalty": 1.0}]
    kinds = [kind(one) for one in params]
    assert [min(kinds[n:], key=lambda one: one.cost) for n in range(4)] == kinds


def test_a_step_depends_on_less_than_its_messages():
    scaled = {"logprobs_mode": LogprobsMode.SCALED, "extra_token_ids": (1,)} | SAMPLED
    raw = {"extra_token_ids": (1,)} | SAMPLED
    assert kind(ASKS | raw).step_key == kind(ASKS | scaled).step_key
    assert kind(ASKS).step_key == kind(ASKS | {"logprobs": 9}).step_key
    more = ASKS | SAMPLED | {"logprobs": 9}
    assert kind(ASKS | SAMPLED).step_key != kind(more).step_key  # one read has a K
    assert kind(SAMPLED).step_key != kind({}).step_key
    for more in ({"draft_logprobs": True}, {"logit_bias": ((1, 2.0),)}):
        assert kind(ASKS | raw).step_key != kind(ASKS | raw | more).step_key
