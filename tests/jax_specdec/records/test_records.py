"""Records as a sequence, their cost in objects, and the statistics."""

import numpy as np
import pytest

from ipc.wire import SlotState
from jax_specdec.records.batch import FinishReason, Statistics
from jax_specdec.records.output_processor import release, step
from jax_specdec.records.record import Records
from tests.support.processor_messages import all_admitted, request, silent, target, tokens


def some_slots(num_slots, **params):
    return all_admitted([request(str(slot), **params) for slot in range(num_slots)])


def test_records_are_a_sequence_over_their_batches():
    state = some_slots(3)
    state, none = step(state, target(0, *(tokens(n) for n in range(3)), draft_follows=True))
    state, records = step(state, target(1, *(tokens(n) for n in range(3, 6))))
    assert (len(none), list(none), len(records)) == (0, [], 6)
    assert [len(batch) for batch in records.batches] == [3, 3]
    steps = [(r.step, r.slot, r.token_ids.tolist()) for r in records]
    assert steps == [(n // 3, n % 3, [n]) for n in range(6)]
    for index in range(-6, 6):
        assert records[index].token_ids.tolist() == [index % 6]
    for index in (6, -7):
        with pytest.raises(IndexError, match=f"record {index} of 6"):
            records[index]
    with pytest.raises(IndexError):
        Records()[0]


def test_events_are_what_a_scheduler_must_act_on():
    state = some_slots(4, stop_token_ids=(9,))
    slots = [tokens(5), tokens(9), silent(SlotState.PREEMPTED), silent(SlotState.RECOVERY_STOP)]
    _, records = step(state, target(0, *slots))
    events = [(r.request_id, r.finish_reason, r.reschedule) for r in records.events()]
    assert events == [
        ("1", FinishReason.STOP_TOKEN, False),
        ("2", None, True),
        ("3", FinishReason.RECOVERY_ERROR, False),
    ]
    _, records = step(some_slots(1), target(0, tokens(5)))
    assert list(records.events()) == []


def test_statistics_by_hand():
    """Three steps of one request: no drafts, 1 of 3 accepted, 2 of 2 accepted; then a cut."""
    state = some_slots(1, max_tokens=5)
    for n, ids, proposed in ((0, (1,), 0), (1, (1, 2), 3), (2, (1, 2, 3), 2)):
        state, records = step(state, target(n, tokens(*ids, drafts=proposed)))
    statistics = records[0].statistics
    assert statistics == state.statistics == state.slot_statistics(0)
    assert statistics.num_tokens == 5  # one was cut
    assert (statistics.steps, statistics.num_drafts, statistics.num_accepted) == (3, 5, 3)
    assert statistics.accept_ratio == 3 / 6
    assert statistics.acceptance_rate == 3 / 5
    assert statistics.average_accepted_length == 6 / 3
    assert (statistics.drafts_at, statistics.accepted_at) == ((2, 2, 1), (2, 1, 0))
    assert statistics.acceptance_at == (1.0, 0.5, 0.0)
    # Position 1 was reached twice and accepted once; position 2 was never reached.
    assert statistics.conditional_acceptance_at == (1.0, 0.5, None)
    assert state.counters.cut_tokens == 1
    assert release(state, 0).statistics == statistics  # the past is not forgotten


def test_statistics_add_up_and_have_no_value_before_there_is_one():
    nothing = Statistics()
    assert nothing.accept_ratio is nothing.acceptance_rate is None
    assert nothing.average_accepted_length is None
    assert nothing.acceptance_at == ()
    one = Statistics((1, 2), (1,), (1, 1), 3)
    assert one + nothing == nothing + one == one
    both = one + Statistics((0, 0, 1), (), (0, 0, 1), 3)
    assert both == Statistics((1, 2, 1), (1,), (1, 1, 1), 6)


@pytest.mark.parametrize("number", [1, 20])
def test_cumulative_logprob_is_the_sum_one_by_one_in_float64(number):
    state = some_slots(number, logprobs=0, max_tokens=1000)
    rng = np.random.default_rng(0)
    expected = [0.0] * number
    for n in range(50):
        logprobs = -rng.exponential(size=(number, 4, 1)).astype(np.float32)
        slots = [tokens(1, 2, 3, 4, columns=1, logprobs=rows) for rows in logprobs]
        state, records = step(state, target(n, *slots))
        for slot, values in enumerate(logprobs[:, :, 0].tolist()):
            for value in values:
                expected[slot] += value
    assert [record.cumulative_logprob for record in records] == expected
