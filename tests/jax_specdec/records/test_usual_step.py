"""Steps in which nothing ends take a way of their own, with the results of the other one."""

import random
from unittest import mock

import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.records import outcomes, usual_step
from jax_specdec.records.output_processor import ProcessorState, abort, admit, release, step
from jax_specdec.records.processor_state import ProcessorError, Progress, StepLost
from tests.support.processor_messages import (
    all_admitted,
    draft,
    drafts,
    first_token,
    request,
    silent,
    target,
    tokens,
)
from tests.support.reference_values import plain

ARRAYS = ("token_ids", "logprobs", "token_ranks", "topk_ids")
NAMES = (*ARRAYS, "slot", "generation", "step", "num_tokens", "num_drafts", "num_accepted",
         "cumulative_logprob", "finish_reason", "stop_token_id", "stop_sequence", "reschedule",
         "statistics", "request_id", "valid", "weights_version")  # fmt: skip


def told(records):
    return [{name: plain(getattr(record, name)) for name in NAMES} for record in records]


def decided(state, message, usual=None):
    """The next state, or None, and what is told of the step; `usual`: which way is taken."""
    is_usual = usual_step.is_usual if usual is None else (lambda *_: usual)
    with mock.patch.object(usual_step, "is_usual", is_usual):
        try:
            after, records = step(state, message)
        except (ProcessorError, StepLost) as error:
            return None, str(error)
    return after, told(records)


def numbers(state):
    columns = state.columns
    every = (
        columns.phase,
        columns.num_tokens,
        columns.cumulative_logprob,
        columns.outcomes.counted(),
    )
    return [x.tolist() for x in every], state.counters, state.statistics, state.next_step


@pytest.mark.parametrize("number", [1, 3, 40])
@pytest.mark.parametrize("k", [None, 0, 2])
def test_both_ways_have_the_same_results(k, number):
    """Lives with stops, limits and steps of other shapes, until all have ended."""
    rng = random.Random(number)
    size = 300
    requests = [
        request(str(i), logprobs=k, max_tokens=rng.randint(20, 60),
                stop_token_ids=tuple(rng.sample(range(size), 2)))
        for i in range(number)
    ]  # fmt: skip
    state = other = all_admitted(requests)
    ways = []
    for number_of_step in range(60):
        slots = []
        for _ in requests:
            proposed = rng.randint(0, 2 + number_of_step % 3)
            ids = [rng.randrange(size) for _ in range(rng.randint(1, proposed + 1))]
            columns = 0 if k is None else k + 1
            slots.append(tokens(*ids, drafts=proposed, columns=columns))
        message = target(number_of_step, *slots)
        ways.append(usual_step.is_usual(state, message))
        state, said = decided(state, message)
        other, expected = decided(other, message, usual=False)
        assert said == expected
        assert numbers(state) == numbers(other)
    assert any(ways)
    assert not all(ways)


def full(**params):
    """Two requests that have had a step."""
    state = all_admitted([request(str(i), logprobs=1, **params) for i in range(2)])
    return step(state, target(0, both(1), both(2)))[0]


def both(*ids, **fields):
    return tokens(*ids, columns=fields.pop("columns", 2), **fields)


def again(state, slot):
    """The slot's request is another one from now on."""
    return admit(release(state, slot), slot, 2, request("c", logprobs=1))


def full_of(*every):
    """Requests of these parameters, whose prompts are still run."""
    state = all_admitted([request(str(i), **(SAME | params)) for i, params in enumerate(every)])
    return step(state, target(0, silent(), silent()))[0]


SAME, SCORED = {"logprobs": 1}, {"logprobs": 1, "prompt_logprobs": 0}
PAIR = [both(5), both(7)]
SHAPES = {
    "a limit is reached": (lambda: full(max_tokens=3), [both(5, 6), both(7)]),
    "a limit is passed": (lambda: full(max_tokens=3), [both(5, 6, 8), both(7)]),
    "a stop token": (lambda: full(stop_token_ids=(8,)), [both(5, 8, 6), both(7)]),
    "a stop token among many": (
        lambda: full(stop_token_ids=(8,)), [both(*range(9, 50)), both(*range(90, 60, -1), 8)],
    ),
    "a stop sequence": (lambda: full(stop_sequences=((5, 6),)), [both(5, 6, 7), both(7)]),
    "history of a stop sequence": (lambda: full(stop_sequences=((1, 6),)), [both(6), both(7)]),
    "a token that a stop sequence begins with": (
        lambda: full(stop_sequences=((5, 6),)), [both(5), both(7)],
    ),
    "chosen ids that are missing": (lambda: full_of(SAME, {"extra_token_ids": (3,)}), PAIR),
    "chosen ids that are missing of all": (
        lambda: full_of({"extra_token_ids": (3,)}, {"extra_token_ids": (3,)}), PAIR,
    ),
    "columns that one did not ask for": (lambda: full_of(SAME, {"logprobs": 2}), PAIR),
    "values that are missing": (lambda: full_of({"entropy": True}, {"entropy": True}), PAIR),
    "rows of prompts that are lost": (lambda: full_of(SCORED, SCORED), PAIR),
    "another generation": (full, [both(5, generation=2), both(7)]),
    "another number of columns": (full, [both(5, columns=3), both(7, columns=3)]),
    "columns that differ": (full, [both(5, columns=3), both(7)]),
    "another mode": (full, [both(5, mode=LogprobsMode.SCALED), both(7, mode=LogprobsMode.SCALED)]),
    "chosen ids": (full, [both(5, chosen=1), both(7, chosen=1)]),
    "no token": (full, [silent(), both(7)]),
    "a first token": (full, [first_token(5, columns=2), both(7)]),
    "fewer slots": (full, [both(5)]),
    "a request that has ended": (
        lambda: abort(full(), "0")[0], [both(5), both(7)],
    ),
    "a slot that was given again": (lambda: again(full(), 1), [both(5), both(7, generation=2)]),
    "a slot that was freed": (lambda: release(full(), 1), [both(5), both(7)]),
    "rows of a prompt that are due": (
        lambda: admit(release(full(), 1), 1, 2, request("p", **SCORED)),
        [both(5), both(7, generation=2)],
    ),
    "tokens that were brought along": (
        lambda: admit(
            release(full(), 1), 1, 2, request("p", logprobs=1, max_tokens=5),
            handed_over=Progress(token_ids=(1, 2, 3, 4), cumulative_logprob=-1.0),
        ),
        [both(5), both(7, generation=2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_other_steps_are_not_usual(shape):
    make, slots = SHAPES[shape]
    state, message = make(), target(1, *slots)
    assert decided(state, message)[1] == decided(state, message, usual=False)[1]
    assert not usual_step.is_usual(state, message)


def test_a_step_whose_drafts_follow_waits_for_them():
    state = full(draft_logprobs=True)
    state, said = decided(state, target(1, both(5), both(6), draft_follows=True))
    assert said == []
    assert not usual_step.is_usual(state, target(2, both(5), both(6)))
    _, said = decided(state, target(2, both(5), both(6)))
    assert [one["step"] for one in said] == [1, 1, 2, 2]


def test_drafts_that_came_first_are_joined():
    state, _ = step(full(draft_logprobs=True), draft(1, drafts(3, columns=2), drafts(4, columns=2)))
    message = target(1, both(5, drafts=1), both(6, drafts=1))
    assert not usual_step.is_usual(state, message)
    _, records = step(state, message)
    assert [record.draft.token_ids.tolist() for record in records] == [[3], [4]]


def test_a_step_that_is_usual_looks_at_no_slot():
    state, message = full(stop_token_ids=(8,)), target(1, both(5), both(7))
    with mock.patch.object(usual_step, "with_outlook") as looked:
        _, said = decided(state, message)
    assert not looked.called
    assert [one["token_ids"] for one in said] == [[5], [7]]


def test_a_state_that_became_full_is_looked_at_again():
    state = admit(ProcessorState.empty(2), 0, 1, request("0", logprobs=1))
    state, _ = step(state, target(0, both(1), silent(generation=0)))
    assert not state.outlook.may_be_usual
    state = admit(state, 1, 1, request("1", logprobs=1))
    state, _ = step(state, target(1, both(1), both(2)))
    assert usual_step.is_usual(state, target(2, both(1), both(2)))


def test_room_is_counted_anew_where_its_bound_is_reached():
    """Drafts that are not accepted take of the bound, and no token of the request's."""
    state, ways = all_admitted([request("0", logprobs=1, max_tokens=30)]), []
    for i in range(24):
        message = target(i, both(5, drafts=4))
        ways.append(usual_step.is_usual(state, message))
        state, _ = step(state, message)
    first = ways.index(True)
    assert True in ways[ways.index(False, first) :]


def test_many_steps_are_counted_at_once():
    """As one by one; wider where a later step has more drafts."""
    rng = np.random.default_rng(0)
    most, number = 5, 3
    counts = together = outcomes.Outcomes.none(number)
    slots = np.arange(number)
    for i in range(3 * outcomes.MOST_RECENT + 5):
        proposed = rng.integers(0, 1 + i % (most + 1), number)
        emitted = rng.integers(1, proposed + 2)
        counts = counts.after(slots, proposed, emitted, int(proposed.max()))
        together = together.after_all(proposed, emitted, int(proposed.max()))
        assert len(together.recent) < outcomes.MOST_RECENT
    np.testing.assert_array_equal(together.counted(), counts.counted())
    np.testing.assert_array_equal(together.without(1).counted(), counts.without(1).counted())
    assert not counts.without(1).counted()[1].any()
    assert together.counted().sum() == 2 * number * (3 * outcomes.MOST_RECENT + 5)
