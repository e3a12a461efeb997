"""The output processor, behavior by behavior, with hand-made messages."""

import re

import numpy as np
import pytest

from ipc.wire import LogprobsMode, SlotState
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.output_processor import (
    Phase,
    ProcessorError,
    Progress,
    abort,
    admit,
    flush,
    release,
    step,
)
from tests.support.paths import ROOT
from tests.support.processor_messages import (
    admitted,
    draft,
    drafts,
    first_token,
    request,
    run,
    silent,
    target,
    tokens,
)

pytestmark = pytest.mark.fast


def test_a_record_has_the_tokens_and_their_logprobs():
    state = admitted(num_slots=2, slot=1, logprobs=2, extra_token_ids=(9,))
    message = target(0, silent(SlotState.STOPPED), tokens(5, 6, drafts=3, columns=3, chosen=1))
    _, ((record,),) = run(state, message)
    assert (record.request_id, record.step, record.slot, record.generation) == ("r", 0, 1, 1)
    assert record.token_ids.tolist() == [5, 6]
    np.testing.assert_array_equal(record.logprobs, message.slot(1).logprobs[:, :3])
    np.testing.assert_array_equal(record.chosen_logprobs, message.slot(1).logprobs[:, 3:])
    assert record.token_ranks.tolist() == [1, 2]
    assert record.topk_ids.tolist() == [[5, 6], [6, 7]]
    assert record.valid.tolist() == [True, True]
    assert (record.num_drafts, record.num_accepted) == (3, 1)
    assert record.cumulative_logprob == -(6 / 8) - (7 / 8)
    assert (record.finish_reason, record.reschedule) == (None, False)
    assert record.draft is None
    assert record.handover_draft_ids is None
    assert record.statistics is None
    for array in (record.token_ids, record.logprobs, record.token_ranks, record.topk_ids):
        assert array.base is not None  # a view of the message, no copy
        assert not array.flags.writeable


def test_no_logprobs_asked_means_none_not_empty():
    _, ((record,),) = run(admitted(), target(0, tokens(5)))
    assert record.token_ids.tolist() == [5]
    assert record.logprobs is record.token_ranks is record.topk_ids is None
    assert record.chosen_logprobs is record.valid is record.cumulative_logprob is None


def test_k_zero_has_the_token_and_its_rank_only():
    _, ((record,),) = run(admitted(logprobs=0), target(0, tokens(7, columns=1)))
    assert record.logprobs.tolist() == [[-1.0]]
    assert record.topk_ids.shape == (1, 0)
    assert record.chosen_logprobs.shape == (1, 0)


def test_cumulative_logprob_adds_up_in_float64_and_an_invalid_row_makes_it_nan():
    state = admitted(logprobs=0)
    bad = tokens(3, 4, columns=1, logprobs=[[-0.5], [np.nan]], ranks=[1, 0])
    _, released = run(
        state, target(0, tokens(1, columns=1)), target(1, bad), target(2, tokens(1, columns=1))
    )
    first, second, third = (record for (record,) in released)
    assert first.cumulative_logprob == -0.25
    assert second.valid.tolist() == [True, False]
    assert np.isnan(second.cumulative_logprob)
    assert third.valid.tolist() == [True]
    assert np.isnan(third.cumulative_logprob)


def test_tokens_behind_a_stop_token_are_cut_with_their_logprobs():
    state = admitted(logprobs=1, stop_token_ids=(6,))
    state, ((record,),) = run(state, target(0, tokens(5, 6, 7, 6, columns=2)))
    assert record.token_ids.tolist() == [5, 6]
    assert record.logprobs.shape == (2, 2)
    assert record.token_ranks.shape == (2,)
    assert record.topk_ids.shape == (2, 1)
    assert record.cumulative_logprob == -(6 / 8) - (7 / 8)  # nothing of the cut tokens
    assert (record.finish_reason, record.stop_token_id) == (FinishReason.STOP_TOKEN, 6)
    assert record.stop_sequence is None
    assert (record.num_drafts, record.num_accepted) == (3, 3)  # verification, before the cut
    assert state.counters.cut_tokens == 2
    assert state.counters.finished[FinishReason.STOP_TOKEN - 1] == 1


def test_the_length_limit_cuts_and_a_stop_at_the_same_token_wins():
    _, ((record,),) = run(admitted(max_tokens=2), target(0, tokens(5, 6, 7)))
    assert (record.token_ids.tolist(), record.finish_reason) == ([5, 6], FinishReason.LENGTH)
    state = admitted(max_tokens=2, stop_token_ids=(6,))
    _, ((record,),) = run(state, target(0, tokens(5, 6, 7)))
    assert (record.token_ids.tolist(), record.finish_reason) == ([5, 6], FinishReason.STOP_TOKEN)
    state = admitted(max_tokens=2, stop_token_ids=(7,))  # behind the limit: never seen
    _, ((record,),) = run(state, target(0, tokens(5, 6, 7)))
    assert record.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("split", range(1, 6))
def test_a_stop_sequence_may_span_steps(split):
    ids = [1, 2, 1, 2, 3, 9]
    state = admitted(stop_sequences=((8, 8), (1, 2, 3)))
    messages = [target(0, tokens(*ids[:split])), target(1, tokens(*ids[split:]))]
    state, released = run(state, *messages)
    records = [record for step_records in released for record in step_records]
    assert [id for record in records for id in record.token_ids.tolist()] == [1, 2, 1, 2, 3]
    assert records[-1].finish_reason is FinishReason.STOP_SEQUENCE
    assert records[-1].stop_sequence == (1, 2, 3)
    assert records[-1].stop_token_id is None
    assert state.counters.cut_tokens + state.counters.surplus_tokens == 1


@pytest.mark.parametrize("split", range(1, 6))
def test_a_stop_sequence_is_not_looked_for_before_min_tokens(split):
    """It may begin among the first tokens, and one that ends with them is none."""
    ids = [1, 2, 1, 2, 1, 2]
    for least, kept in ((1, 2), (2, 4), (3, 4), (5, 6)):
        state = admitted(stop_sequences=((1, 2),), min_tokens=least)
        messages = [target(0, tokens(*ids[:split])), target(1, tokens(*ids[split:]))]
        _, released = run(state, *messages)
        records = [record for step_records in released for record in step_records]
        assert [id for record in records for id in record.token_ids.tolist()] == ids[:kept]
        assert records[-1].finish_reason is FinishReason.STOP_SEQUENCE


def test_a_stop_sequence_never_begins_in_another_request():
    state = admitted(stop_sequences=((1, 2),), id="old")
    state, _ = run(state, target(0, tokens(1)))
    state = admit(release(state, 0), 0, 2, request("new", stop_sequences=((1, 2),)))
    _, ((record,),) = run(state, target(1, tokens(2, generation=2)))
    assert record.finish_reason is None


def test_tokens_after_the_end_are_surplus_and_never_delivered():
    state = admitted(stop_token_ids=(6,))
    state, released = run(state, target(0, tokens(6)), target(1, tokens(7, 8)))
    assert [len(records) for records in released] == [1, 0]
    assert state.counters.surplus_tokens == 2
    state, (records,) = run(release(state, 0), target(2, tokens(9)))
    assert not records
    assert state.counters.surplus_tokens == 3
    assert state.statistics.num_tokens == 1


def test_nothing_and_stopped_make_no_record():
    for slot_state in (SlotState.NOTHING, SlotState.STOPPED):
        state, (records,) = run(admitted(), target(0, silent(slot_state)))
        assert not records
        assert state.columns.phase[0] == Phase.RUNNING
        assert state.statistics.steps == 0


def test_preempted_asks_for_a_reschedule_and_goes_on_where_it_was():
    params = {"logprobs": 0, "max_tokens": 4, "stop_sequences": ((1, 2),)}
    state = admitted(**params)
    state, released = run(
        state, target(0, tokens(3, 1, columns=1)), target(1, silent(SlotState.PREEMPTED))
    )
    (record,) = released[1]
    assert record.reschedule
    assert record.finish_reason is None
    assert record.token_ids.tolist() == []
    assert record.logprobs.shape == (0, 1)
    assert record.statistics.num_tokens == 2
    assert state.live_request_ids == ()
    state, (surplus,) = run(state, target(2, tokens(9, columns=1)))
    assert not surplus
    progress = Progress(token_ids=(3, 1), cumulative_logprob=record.cumulative_logprob)
    state = admit(release(state, 0), 0, 2, request(**params), handed_over=progress)
    _, ((record,),) = run(state, target(3, tokens(2, 5, 6, generation=2, columns=1)))
    assert record.token_ids.tolist() == [2]
    assert record.stop_sequence == (1, 2)  # its first token came before the preemption
    assert record.cumulative_logprob == -(4 + 2 + 3) / 8


def test_recovery_stop_finishes_with_an_error():
    state, ((record,),) = run(admitted(), target(0, silent(SlotState.RECOVERY_STOP)))
    assert record.finish_reason is FinishReason.RECOVERY_ERROR
    assert record.token_ids.size == 0
    assert state.columns.phase[0] == Phase.ENDED


def test_a_prefill_node_hands_over_after_the_first_token():
    state = admitted(prefill=True, logprobs=1, max_tokens=5)
    state, ((record,),) = run(state, target(0, first_token(5, 6, 7, columns=2)))
    assert record.token_ids.tolist() == [5]
    assert record.logprobs.shape == (1, 2)
    assert record.handover_draft_ids.tolist() == [6, 7]
    assert record.finish_reason is FinishReason.PREFILL_HANDOVER
    assert (record.num_drafts, record.num_accepted) == (0, 0)  # nothing was verified
    assert state.statistics.num_drafts == 0


def test_a_first_token_that_ends_the_request_is_not_handed_over():
    for params, reason in (
        ({"stop_token_ids": (5,)}, FinishReason.STOP_TOKEN),
        ({"max_tokens": 1}, FinishReason.LENGTH),
    ):
        state = admitted(prefill=True, **params)
        _, ((record,),) = run(state, target(0, first_token(5, 6, 7)))
        assert record.finish_reason is reason
        assert record.handover_draft_ids is None


def test_the_decode_node_goes_on_without_a_duplicated_or_missing_token():
    params = {"logprobs": 0, "max_tokens": 3}
    prefill = admitted(prefill=True, **params)
    _, ((first,),) = run(prefill, target(0, first_token(5, 6, columns=1)))
    progress = Progress(
        token_ids=tuple(first.token_ids.tolist()), cumulative_logprob=first.cumulative_logprob
    )
    state = admitted(handed_over=progress, **params)
    state, ((record,),) = run(state, target(0, tokens(6, 7, 8, columns=1)))
    assert [*first.token_ids, *record.token_ids] == [5, 6, 7]
    assert record.finish_reason is FinishReason.LENGTH
    assert record.cumulative_logprob == -(6 + 7 + 8) / 8
    assert state.statistics.num_tokens == 2  # of this node
    with pytest.raises(ProcessorError, match="delivered twice"):
        step(admitted(handed_over=progress, **params), target(0, first_token(5, 6, columns=1)))


def test_a_first_token_outside_a_prefill_node_goes_on():
    state, released = run(admitted(), target(0, first_token(5, 6)), target(1, tokens(6, 7)))
    (first,), (second,) = released
    assert (first.token_ids.tolist(), first.finish_reason) == ([5], None)
    assert first.handover_draft_ids.tolist() == [6]
    assert second.token_ids.tolist() == [6, 7]
    assert state.statistics.num_accepted == 1


def test_abort_ends_a_request_once():
    state, _ = run(admitted(num_slots=2, logprobs=0), target(0, tokens(1, columns=1)))
    state, records = abort(state, "r")
    (record,) = records
    assert (record.request_id, record.finish_reason) == ("r", FinishReason.ABORT)
    assert record.token_ids.size == 0
    assert record.cumulative_logprob == -0.25
    assert record.statistics.num_tokens == 1
    assert len(abort(state, "r")[1]) == 0
    assert len(abort(state, "unknown")[1]) == 0
    state, (surplus,) = run(state, target(1, tokens(2, columns=1)))
    assert not surplus


def test_finish_reasons_are_those_of_the_contract():
    assert [reason.name for reason in FinishReason] == [
        "STOP_TOKEN", "STOP_SEQUENCE", "LENGTH", "ABORT", "RECOVERY_ERROR", "PREFILL_HANDOVER",
        "WORKER_LOST", "ATTEMPTS_EXHAUSTED", "STOP_STRING", "DEADLINE",
    ]  # fmt: skip


def test_progress_with_nothing_left_is_refused():
    for progress, params, complaint in (
        (Progress(token_ids=(1, 2)), {"max_tokens": 2}, "nothing is left"),
        (Progress(token_ids=(6,)), {"stop_token_ids": (6,)}, "ended with stop token 6"),
        (Progress(token_ids=(1, 2)), {"stop_sequences": ((1, 2),)}, "ended with a stop sequence"),
        (
            Progress(token_ids=(1, 2)),
            {"stop_sequences": ((1, 2),), "min_tokens": 1},
            "ended with a stop sequence",
        ),
        (Progress(token_ids=(1,)), {"logprobs": 0}, "needs cumulative_logprob"),
    ):
        with pytest.raises(ProcessorError, match=complaint):
            admitted(handed_over=progress, **params)


def test_rows_that_were_not_asked_for_are_refused():
    with pytest.raises(
        ProcessorError, match=r"asked for 1 column .*the target message of step 0 has 2"
    ):
        step(admitted(logprobs=0), target(0, tokens(5, columns=2)))


def test_flush_for_a_lost_worker_ends_every_live_request():
    state = admit(admitted(num_slots=3, stop_token_ids=(6,)), 1, 1, request("s"))
    state, _ = run(state, target(0, tokens(6), tokens(5), silent(SlotState.STOPPED)))
    state, records = flush(state, FinishReason.WORKER_LOST)
    assert [(r.request_id, r.finish_reason) for r in records] == [("s", FinishReason.WORKER_LOST)]
    assert len(flush(state, FinishReason.WORKER_LOST)[1]) == 0


def test_step_is_pure():
    state = admitted(logprobs=0, stop_sequences=((1, 2, 3),))
    columns = [getattr(state.columns, name).copy() for name in state.columns.__slots__]
    message = target(0, tokens(1, 2, drafts=4, columns=1))
    after, once = step(state, message)
    for name, before in zip(state.columns.__slots__, columns, strict=True):
        np.testing.assert_array_equal(getattr(state.columns, name), before)
        assert not getattr(after.columns, name).flags.writeable
    _, twice = step(state, message)
    assert once[0].token_ids.tolist() == twice[0].token_ids.tolist()


def test_drafts_are_joined_to_their_step():
    state = admitted(draft_logprobs=True, logprobs=0)
    state, (none, (record,)) = run(
        state,
        target(0, tokens(5, drafts=2, columns=1), draft_follows=True),
        draft(0, drafts(7, 8, columns=1)),
    )
    assert none == []
    assert record.draft.token_ids.tolist() == [7, 8]
    assert record.draft.logprobs.tolist() == [[-1.0], [-1.125]]
    assert record.draft.token_ranks.tolist() == [3, 4]
    assert record.draft.topk_ids.shape == (2, 0)
    assert state.counters.late_drafts == 0


def test_the_cumulative_logprob_is_in_the_requests_own_mode():
    params = {"logprobs": 0, "logprobs_mode": LogprobsMode.SCALED}
    state = admitted(**params)
    scaled = tokens(1, 2, columns=1, mode=LogprobsMode.SCALED, logprobs=[[-0.25], [-0.5]])
    _, (record,) = step(state, target(0, scaled))
    assert record.cumulative_logprob == -0.75
    raw = tokens(1, 2, columns=1, logprobs=[[-0.25], [-0.5]])
    with pytest.raises(ProcessorError, match=r"mode SCALED; the target .* has 1, 0 and RAW"):
        step(state, target(0, raw))


def test_cumulative_logprobs_of_minus_infinity_and_nan():
    state = admitted(logprobs=0)
    totals = []
    for n, value in enumerate([-0.5, -np.inf, -0.5, np.nan, -0.5]):
        rank = 0 if np.isnan(value) else 1
        slot = tokens(1, columns=1, logprobs=[[value]], ranks=[rank])
        state, (record,) = step(state, target(n, slot))
        totals.append(record.cumulative_logprob)
    assert totals[:3] == [-0.5, -np.inf, -np.inf]
    assert np.isnan(totals[3:]).all()


def test_the_documented_example_runs():
    page = ROOT / "docs" / "output_processor.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    exec(compile(example, page.name, "exec"), {})
