"""Kinds of batches, and which kind's programs serve which batch."""

import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device.loop.host_slots import OneRead, Slot
from jax_specdec.device.loop.kinds import Kind
from jax_specdec.device.messages.asked_changes import ChangesSize
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.requests import SamplingParams

pytestmark = pytest.mark.fast
SAMPLED = {"temperature": 0.5}
ASKS = {"logprobs": 3}


def slots(*params):
    taken = [Slot(params=SamplingParams(**one), most_tokens=4) for one in params]
    return [*taken, Slot(generation=7)]


def kind(*params, **options):
    return Kind.of_slots(slots(*params), 300, **{"one_reads": OneRead, "draws": True} | options)


def serves(one, *params):
    exact = Kind.of_slots(slots(*params), 300, one_reads=OneRead, draws=True)
    return one.serves(exact, slots(*params))


WIDER = [
    (ASKS | {"logprobs": 6}, ASKS),
    (ASKS | {"logprobs": 0}, {}),
    (ASKS | {"extra_token_ids": (1,)}, ASKS),
    (ASKS | {"extra_token_ids": tuple(range(17))}, ASKS | {"extra_token_ids": (1,)}),
    (SAMPLED | ASKS | {"logprobs_mode": LogprobsMode.PROCESSED}, SAMPLED | ASKS),
    (SAMPLED | {"kept_token_ids": True}, SAMPLED),
    (ASKS | {"draft_logprobs": True, "extra_token_ids": (1,)}, ASKS | {"extra_token_ids": (1,)}),
    ({"logit_bias": ((1, 2.0),)}, {}),
    ({"logit_bias": tuple((i, 1.0) for i in range(17))}, {"logit_bias": ((1, 2.0),)}),
    ({"presence_penalty": 1.0, "logit_bias": ((1, 2.0),)}, {"logit_bias": ((1, 2.0),)}),
    (ASKS | SAMPLED, ASKS),
]


@pytest.mark.parametrize(("more", "less"), WIDER)
def test_what_serves_more_serves_less_and_not_the_other_way_round(more, less):
    wide, narrow = kind(more), kind(less)
    assert wide != narrow
    assert serves(wide, more)
    assert serves(wide, less)
    assert not serves(narrow, more)
    assert serves(narrow, less)


def test_programs_of_one_read_serve_plain_batches_though_few_ask():
    greedy, sampled = kind(ASKS), kind(ASKS | SAMPLED)
    assert (greedy.one_read, sampled.one_read) == (OneRead.GREEDY, OneRead.SAMPLED)
    few = ASKS, {}, {}
    assert kind(*few).one_read is OneRead.NOTHING
    assert serves(greedy, *few)
    assert not serves(greedy, ASKS, SAMPLED)
    assert serves(sampled, ASKS, SAMPLED)
    for other in (ASKS | {"extra_token_ids": (1,)}, {"logit_bias": ((1, 2.0),)}):
        wide = greedy._replace(widths=Widths(k=64, chosen=16), changes=ChangesSize(16, True))
        assert not serves(wide, other)


def test_without_one_read_or_drawn_drafts_there_are_fewer_kinds():
    assert kind(ASKS, one_reads=()) == Kind(widths=Widths(k=5))
    assert not kind(ASKS | {"draft_logprobs": True}, draws=False).reports_drafts


def test_the_cheapest_kind_comes_first():
    params = [{}, ASKS, {"logprobs": 100}, {"presence_penalty": 1.0}]
    kinds = [kind(one) for one in params]
    assert [min(kinds[n:], key=lambda one: one.cost) for n in range(4)] == kinds


def test_a_step_depends_on_less_than_its_messages():
    scaled = {"logprobs_mode": LogprobsMode.SCALED, "extra_token_ids": (1,)} | SAMPLED
    raw = {"extra_token_ids": (1,)} | SAMPLED
    assert kind(ASKS | raw).of_step == kind(ASKS | scaled).of_step
    assert kind(ASKS).of_step != kind(ASKS | {"logprobs": 9}).of_step  # one read has a K
    for more in ({"draft_logprobs": True}, {"logit_bias": ((1, 2.0),)}):
        assert kind(ASKS | raw).of_step != kind(ASKS | raw | more).of_step
