"""The widths of steps: the estimates, the times, and steps of other widths in the loop."""

import dataclasses
import itertools
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.drafting.draft_model import DraftModel
from jax_specdec.device.drafting.drafters import NgramDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.loop import step
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.kinds import StepKind
from jax_specdec.device.messages.logit_changes import ChangesSize
from jax_specdec.device.worker import worker
from jax_specdec.device.worker.step_widths import UNSEEN, DraftHistory, StepWidths
from pallas_kernels.sampling import Drafts
from tests.support.decoding import VOCAB, Local, mixed_requests, random_model, request, run

D = 3
FULL, NONE, HALF = StepKind(), StepKind(num_drafts=0), StepKind(num_drafts=1)
SLOTS = [Slot(generation=7, most_tokens=D + 1), Slot()]
TIMES = {NONE: 1.0, HALF: 1.2, FULL: 1.5}


def after(widths, fates, steps=1, narrower=(NONE, HALF)):
    """The kinds of steps whose drafts have these fates, again and again, as fast as `TIMES`."""
    chosen = []
    for fate in itertools.islice(itertools.cycle(fates), steps):
        chosen.append(widths.choose(FULL, SLOTS, narrower))
        widths.took(chosen[-1], TIMES[chosen[-1]])
        widths.saw([7, 0], [fate(chosen[-1]), 0])
    return chosen


def wrong(kind):
    return ~0


def right(kind):
    """All that can be: a full step has no draft for its last token."""
    return D if kind == FULL else kind.num_drafts + 1


@pytest.mark.fast
def test_a_narrower_step_verifies_no_draft():
    assert FULL.narrower(D) == (NONE,)
    assert FULL.narrower(0) == ()
    assert StepKind(reports_drafts=True).narrower(D) == ()  # it follows every draft
    assert NONE.step_options["num_drafts"] == 0
    (bare,) = StepKind(changes=ChangesSize(16, penalties=True, grammar=True)).narrower(D)
    assert bare == StepKind(changes=ChangesSize(16, penalties=True), num_drafts=0)


@pytest.mark.fast
def test_a_text_is_drafted_for_while_its_drafts_come_right():
    """Wrong drafts end in steps without any; a run of right ones is full width at once."""
    widths = StepWidths(D, certain=True)
    assert set(after(widths, [wrong], 40)) == {FULL, NONE, HALF}  # each is measured
    assert after(widths, [wrong], 200).count(NONE) > 190
    assert after(widths, [right], 60)[10:].count(FULL) >= 48
    assert after(widths, [wrong], 60)[20:].count(NONE) >= 38


@pytest.mark.fast
def test_new_requests_have_estimates_of_their_own():
    widths = StepWidths(D, certain=True)
    after(widths, [wrong], 200)
    assert widths.text_of(0, 7).after_wrong < widths.text_of(0, 8).after_wrong
    assert widths.choose(FULL, SLOTS, [NONE]) == NONE
    assert widths.choose(FULL, SLOTS, []) == FULL


@pytest.mark.fast
def test_drafts_that_were_drawn_are_verified_now_and_then():
    """They do not tell what they would have been, and full steps cost less than 2 % of the time.

    There are two in a row: the first has no drafts, as none were drawn for it.
    """
    widths = StepWidths(D, certain=False)
    after(widths, [wrong], 100, [NONE])
    chosen = after(widths, [lambda kind: ~0 if kind == FULL else 0], 10 * UNSEEN, [NONE])
    runs = [sum(1 for _ in run) for kind, run in itertools.groupby(chosen) if kind == FULL]
    assert 9 <= len(runs) <= 11
    assert set(runs) == {2}
    assert sum(TIMES[kind] - TIMES[NONE] for kind in chosen) < 0.02 * len(chosen)
    assert FULL in after(widths, [right], 300, [NONE])[-20:]


@pytest.mark.fast
def test_times_are_measured_again():
    """A width that became cheaper is found, on a machine that slows down and is held up."""
    widths = StepWidths(D, certain=True)
    after(widths, [wrong], 100)
    now, chosen = {NONE: 1.0, HALF: 0.7, FULL: 1.5}, []
    for number in range(12 * UNSEEN):
        chosen.append(widths.choose(FULL, SLOTS, [NONE, HALF]))
        slower = (1 + number / 100) * (20 if number % 50 == 0 else 1)
        widths.took(chosen[-1], None if number % 7 == 0 else slower * now[chosen[-1]])
        widths.saw([7, 0], [~0, 0])
    assert chosen[-100:].count(HALF) > 90
    np.testing.assert_allclose(widths.costs[FULL] - widths.costs[NONE], np.log(1.5), atol=0.2)


@pytest.mark.fast
def test_a_new_rung_begins_with_the_times_of_another():
    """It makes no step to tell them, and steps of two rungs tell of neither's widths."""
    widths = StepWidths(D, certain=True)
    after(widths, [wrong], 40)
    rung = StepKind(samples=True)
    narrow = [one._replace(samples=True) for one in (NONE, HALF)]
    ratio = widths.costs[FULL] - widths.costs[NONE]
    chosen = []
    for _ in range(30):
        chosen.append(widths.choose(rung, SLOTS, narrow))
        widths.took(chosen[-1], 9 * TIMES[chosen[-1]._replace(samples=False)])
    assert {*chosen} == {narrow[0]}
    assert widths.costs[FULL] - widths.costs[NONE] == ratio
    np.testing.assert_allclose(widths.costs[rung] - widths.costs[narrow[0]], ratio, atol=1e-9)


@pytest.mark.fast
def test_what_fates_tell():
    text = DraftHistory(0, after_right=0.5, after_wrong=0.5)
    text.see(~1)  # right, then wrong
    assert text.after_wrong > 0.5 > text.after_right
    assert not text.is_right
    text.see(2)
    assert text.is_right
    certain = DraftHistory(0, after_right=1.0, after_wrong=1.0)
    assert [certain.expected(width) for width in (0, 1, 3)] == [1, 2, 4]
    assert DraftHistory(0, after_right=1.0, after_wrong=0.0).expected(3) == 1


@pytest.mark.fast
def test_a_step_with_a_prompt_tells_no_time():
    widths = StepWidths(D, certain=True)
    for kind, seconds in ((NONE, 1.0), (FULL, None), (HALF, 9.0), (NONE, 7.5)):
        widths.took(kind, seconds)
    assert FULL not in widths.costs
    np.testing.assert_allclose(widths.costs[HALF] - widths.costs[NONE], np.log(1.2), atol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize(("drawn", "fates"), [(False, [2, ~0, ~1]), (True, [1, ~0, 1])])
def test_certain_drafts_behind_verified_ones_tell_their_fate(drawn, fates):
    """Two tokens of a step with one draft: both were foretold, neither, the first alone."""
    drafts = Drafts.none(3, D, VOCAB) if drawn else NgramDrafter(D).init(3, 9)[0]
    drafts = drafts._replace(token_ids=jnp.full((3, D), 4), num=jnp.full(3, D))
    emitted = jnp.array([[4, 4], [5, -1], [4, 6]])
    output = SimpleNamespace(token_ids=emitted, num_tokens=jnp.array([2, 1, 2]))
    np.testing.assert_array_equal(step.fates_of.__wrapped__(drafts, output), fates)


class Turning:
    """Widths that change from step to step, and what was seen."""

    def __init__(self, widths):
        self.widths, self.fates, self.times = itertools.cycle(widths), [], []

    def choose(self, kind, slots, narrower):
        width = next(self.widths)
        return kind if width == D else kind._replace(num_drafts=width)

    def took(self, kind, seconds):
        self.times.append(seconds)

    def saw(self, generations, fates):
        self.fates.append(fates)


def decoded(requests, drafter, widths, **options):
    """The ids of each request, its records with tokens, and fates."""
    turning = Turning(widths)
    with mock.patch.object(worker, "StepWidths", return_value=turning):
        found = run(requests, drafter, adaptive=True, **options)
    records = [[r for r in found.records[item.id] if r.num_tokens] for item in requests]
    return [found.token_ids(item.id) for item in requests], records, turning.fates


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_a_step_behind_another_program_has_no_time(prompt_logprobs):
    local = Local("ngram", adaptive=True)
    local.worker.step_widths = turning = Turning([D])
    local.admit(request("a", [1, 2, 3], max_tokens=40))
    local.advance(4)
    assert all(seconds > 0 for seconds in turning.times[1:])
    local.admit(request("b", [4] * 20, max_tokens=9, prompt_logprobs=prompt_logprobs))
    del turning.times[:]
    local.advance(7)
    before, *behind, after = [seconds is None for seconds in turning.times]
    assert (before, after) == (False, False)
    assert sum(behind) == 3  # chunks of 8
    local.drain()


@pytest.mark.parametrize(
    "name", ["ngram", *(pytest.param(one, marks=pytest.mark.slow) for one in ("suffix", "mtp"))]
)
def test_no_width_changes_a_token(name):
    """Sampled ids, with certain drafts, and greedy ones with drawn drafts."""
    sampled = {} if name == "mtp" else {"temperature": 0.2}
    prompts = ([5, 6] * 4, [9, 8, 7] * 3, [3], [4] * 9)
    requests = [
        request(f"r{n}", prompt, max_tokens=40, seed=n, **sampled)
        for n, prompt in enumerate(prompts)
    ]
    plain, _, _ = decoded(requests, "none", [D])
    drafter = SuffixDrafter(D) if name == "suffix" else name
    turning, records, fates = decoded(requests, drafter, [0, 1, D, D])
    assert turning == plain
    drafted = {record.num_drafts for found in records for record in found}
    assert {0, 1, D} <= drafted
    seen = {-1, 0} if name == "mtp" else {-1, 0, 1}  # a random head is seldom right
    assert {np.sign(fate) for step in fates for fate in step} >= seen


@pytest.mark.slow
def test_a_model_that_drew_nothing_goes_on_drafting_right():
    """The target drafts for itself: a row that its cache lacks would show as a refused draft.

    So q is p, whether greedy or sampled.
    """
    params, config = random_model()
    model = dataclasses.replace(params, draft=params), config
    requests = [
        request(f"r{n}", [n + 2] * (n + 1), max_tokens=40, temperature=0.9 * (n % 2), seed=n)
        for n in range(4)
    ]
    drafter = DraftModel(config, config, D)
    _, records, _ = decoded(requests, drafter, [0, D, D, 0, 0, D, D], model=model)
    steps = [record for found in records for record in found]
    assert {record.num_drafts for record in steps} >= {0, D}
    assert all(r.num_accepted == r.num_drafts for r in steps if r.finish_reason is None)


def test_a_fate_is_what_became_of_the_drafts():
    """Each step's fates say how many of its tokens were foretold, at every width."""
    (item,) = mixed_requests(1, ks=(None,))
    item = dataclasses.replace(item, params=dataclasses.replace(item.params, max_tokens=40))
    _, (steps,), fates = decoded([item], "ngram", [D])
    told = [fates[r.step][r.slot] for r in steps]
    assert told == [r.num_accepted if r.num_accepted == D else ~r.num_accepted for r in steps]
    assert len({*told}) > 1
