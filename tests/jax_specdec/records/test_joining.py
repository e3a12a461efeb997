"""Target and draft messages joined by (request, step); nothing lost without an error."""

import pytest

from ipc.wire import LogprobsMode, SlotState
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.output_processor import (
    ProcessorError,
    ProcessorState,
    StepLost,
    abort,
    admit,
    flush,
    release,
    step,
)
from tests.support.processor_messages import draft, drafts, request, silent, target, tokens

pytestmark = pytest.mark.fast


def two_requests(**params):
    state = ProcessorState.empty(3)
    state = admit(state, 0, 1, request("a", draft_logprobs=True, **params))
    return admit(state, 1, 1, request("b", draft_logprobs=True, **params))


def both(step, *, follows=True, a=(5, 6), b=(7,)):
    return target(step, tokens(*a, drafts=2), tokens(*b, drafts=2), draft_follows=follows)


def both_drafts(step):
    return draft(step, drafts(1, 2), drafts(3, 4))


def feed(state, *messages):
    """(request, step, draft ids) of what each message released."""
    released = []
    for message in messages:
        state, records = step(state, message)
        released.append(
            [
                (r.request_id, r.step, None if r.draft is None else r.draft.token_ids.tolist())
                for r in records
            ]
        )
    return state, released


def test_the_draft_message_releases_its_step():
    _, released = feed(two_requests(), both(0), both_drafts(0), both(1), both_drafts(1))
    assert released == [
        [],
        [("a", 0, [1, 2]), ("b", 0, [3, 4])],
        [],
        [("a", 1, [1, 2]), ("b", 1, [3, 4])],
    ]


def test_a_draft_message_that_comes_first_waits_for_its_target():
    state, released = feed(two_requests(), both_drafts(0), both(0))
    assert released == [[], [("a", 0, [1, 2]), ("b", 0, [3, 4])]]
    assert state.counters.late_drafts == 0


def test_no_draft_follows_means_at_once():
    _, released = feed(two_requests(), both(0, follows=False))
    assert released == [[("a", 0, None), ("b", 0, None)]]


def test_a_lost_draft_message_costs_only_the_drafts():
    """The first message of a later step releases the records, be it a target or a draft."""
    _, released = feed(two_requests(), both(0), both(1), both_drafts(1))
    assert released == [
        [],
        [("a", 0, None), ("b", 0, None)],
        [("a", 1, [1, 2]), ("b", 1, [3, 4])],
    ]
    _, released = feed(two_requests(), both(0), both_drafts(1), both(1))
    assert released == [
        [],
        [("a", 0, None), ("b", 0, None)],
        [("a", 1, [1, 2]), ("b", 1, [3, 4])],
    ]


def test_a_late_draft_message_is_counted_and_touches_nothing():
    state, released = feed(two_requests(), both(0), both(1), both_drafts(0), both_drafts(1))
    assert released[2] == []
    assert released[3] == [("a", 1, [1, 2]), ("b", 1, [3, 4])]
    assert state.counters.late_drafts == 2


def test_the_end_of_the_stream_releases_what_waits():
    state, _ = feed(two_requests(), both(0))
    state, records = flush(state)
    assert [(r.request_id, r.finish_reason) for r in records] == [("a", None), ("b", None)]
    assert state.live_request_ids == ("a", "b")
    assert len(flush(state)[1]) == 0


def test_a_lost_worker_ends_waiting_requests_on_their_waiting_record():
    state, _ = feed(two_requests(stop_token_ids=(7,)), both(0))
    state, records = flush(state, FinishReason.WORKER_LOST)
    ended = {r.request_id: (r.finish_reason, r.token_ids.tolist()) for r in records}
    assert ended == {
        "a": (FinishReason.WORKER_LOST, [5, 6]),
        "b": (FinishReason.STOP_TOKEN, [7]),
    }
    assert len(records) == 2


def test_an_abort_takes_only_its_own_waiting_record():
    state, _ = feed(two_requests(), both(0))
    state, records = abort(state, "a")
    (record,) = records
    assert (record.finish_reason, record.token_ids.tolist()) == (FinishReason.ABORT, [5, 6])
    state, released = feed(state, both_drafts(0))
    assert released == [[("b", 0, [3, 4])]]
    assert state.counters.late_drafts == 1  # those of the aborted request


def test_a_finished_request_waits_for_its_drafts_even_when_its_slot_is_given_away():
    state, _ = feed(two_requests(stop_token_ids=(5,)), both(0))
    state = admit(release(state, 0), 0, 2, request("new"))
    state, released = feed(state, draft(0, drafts(1, 2), drafts(3, 4)))
    assert released == [[("a", 0, [1, 2]), ("b", 0, [3, 4])]]


def test_drafts_of_a_new_generation_never_join_an_old_record():
    state, _ = feed(two_requests(), both(0))
    state, released = feed(state, draft(0, drafts(8, 9, generation=2), drafts(3, 4)))
    assert released == [[("a", 0, None), ("b", 0, [3, 4])]]
    assert state.counters.late_drafts == 1


def test_a_slot_without_drafts_in_the_draft_message_has_none():
    _, released = feed(two_requests(), both(0), draft(0, silent(), drafts(3, 4)))
    assert released[1] == [("a", 0, None), ("b", 0, [3, 4])]


def test_drafts_without_logprobs_are_ids_alone():
    state = admit(two_requests(), 2, 1, request("c", logprobs=2, draft_logprobs=True))
    state, _ = step(
        state, target(0, tokens(5), tokens(6), tokens(7, columns=3), draft_follows=True)
    )
    state, records = step(state, draft(0, drafts(1, 2), silent(), drafts(3, 4, columns=3)))
    records = [records[0], records[2]]
    assert records[0].draft.token_ids.tolist() == [1, 2]
    assert records[0].draft.logprobs is records[0].draft.topk_ids is None
    assert records[0].draft.token_ranks is records[0].draft.chosen_logprobs is None
    assert records[1].draft.logprobs.shape == (2, 3)
    assert records[1].draft.topk_ids.tolist() == [[3, 4], [4, 5]]


ASKED = {"logprobs": 1, "extra_token_ids": (3, 4), "draft_logprobs": True}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"columns": 3}, "has 3, 2 and RAW"),
        ({"columns": 0, "chosen": 0}, "has 0, 0 and RAW"),
        ({"chosen": 1}, "has 2, 1 and RAW"),
        ({"mode": LogprobsMode.PROCESSED}, "has 2, 2 and PROCESSED"),
    ],
)
def test_drafts_with_other_rows_than_were_asked_for_are_refused(wrong, complaint):
    """Either message may come first; nothing changes, and the records that wait can go on."""
    before = admit(ProcessorState.empty(2), 0, 1, request("plain", draft_logprobs=True))
    before = admit(before, 1, 1, request("a", **ASKED))
    fields = {"columns": 2, "chosen": 2}
    first = target(0, tokens(6), tokens(5, **fields), draft_follows=True)
    good, bad = (draft(0, drafts(9), drafts(1, 2, **fields | other)) for other in ({}, wrong))
    asked = r"slot 1: request 'a' asked for 2 columns .*, 2 chosen ids and mode RAW; "
    complaint = f"{asked}the draft message of step 0 {complaint}"

    waiting, _ = step(before, first)
    with pytest.raises(ProcessorError, match=complaint):
        step(waiting, bad)
    _, records = step(waiting, good)
    assert [record.draft.token_ids.tolist() for record in records] == [[9], [1, 2]]

    early, _ = step(before, bad)
    with pytest.raises(ProcessorError, match=complaint):
        step(early, first)
    assert early.next_step == 0


def test_the_rows_of_drafts_are_those_of_their_own_request():
    """Where a slot was given away meanwhile, the new request's K does not matter."""
    state = admit(ProcessorState.empty(1), 0, 1, request("old", max_tokens=1, **ASKED))
    fields = {"columns": 2, "chosen": 2}
    state, _ = step(state, target(0, tokens(5, **fields), draft_follows=True))
    state = admit(release(state, 0), 0, 2, request("new", logprobs=5))
    _, (record,) = step(state, draft(0, drafts(1, **fields)))
    assert record.draft.chosen_logprobs.shape == (1, 2)
    _, (record,) = step(state, draft(0, drafts(1, generation=2, columns=3)))  # late, so not checked
    assert record.draft is None


def test_drafts_are_whole_where_their_tokens_were_cut():
    """All d of them, accepted or not: a stop cuts tokens, not verified drafts."""
    state = two_requests(max_tokens=1)
    _, released = feed(state, both(0, a=(5, 6, 7)), both_drafts(0))
    assert released[1] == [("a", 0, [1, 2]), ("b", 0, [3, 4])]


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ((0, 1, 4), r"target message 4 came, 2 was next: steps 2 to 3 \(2\) are lost"),
        ((0, 1, 1), r"target message 1 came, 2 was next: .*twice"),
        ((0, 1, 0), r"target message 0 came, 2 was next: .*twice or out of order"),
        ((1,), r"target message 1 came, 0 was next"),
    ],
)
def test_a_gap_or_a_repeat_is_an_error_that_says_what_was_lost(steps, complaint):
    state, _ = feed(two_requests(), *(both(n, follows=False) for n in steps[:-1]))
    with pytest.raises(StepLost, match=complaint):
        step(state, both(steps[-1]))


def test_a_draft_message_can_prove_that_targets_are_lost():
    state, _ = feed(two_requests(), both(0))
    with pytest.raises(StepLost, match=r"step 3 came before .* steps 1 to 2 are lost"):
        step(state, both_drafts(3))
    state, _ = feed(state, both_drafts(1))
    with pytest.raises(StepLost, match="draft message of step 1 came twice"):
        step(state, both_drafts(1))


def test_a_reader_may_join_a_running_stream():
    state = admit(ProcessorState.empty(1, first_step=None), 0, 1, request("a"))
    state, released = feed(state, draft(40, drafts(1)), target(41, tokens(5)))
    assert released == [[], [("a", 41, None)]]
    with pytest.raises(StepLost):
        step(state, target(43, tokens(5)))


def test_each_ring_has_its_own_state():
    """save_each_rank: two rings number their steps, slots and generations independently."""
    states = [
        admit(ProcessorState.empty(1, process_rank=rank), 0, 1, request(f"on {rank}"))
        for rank in (0, 1)
    ]
    for rank, state in enumerate(states):
        _, records = step(state, target(0, tokens(5), process_rank=rank))
        assert records[0].request_id == f"on {rank}"
    with pytest.raises(ProcessorError, match="of process rank 1; this state belongs to rank 0"):
        step(states[0], target(0, tokens(5), process_rank=1))


def test_messages_that_do_not_fit_are_refused():
    with pytest.raises(ProcessorError, match="4 slots; this state has 3"):
        step(two_requests(), target(0, *[silent(SlotState.STOPPED)] * 4))


def test_a_message_may_have_fewer_slots_than_the_state():
    state, released = feed(two_requests(), target(0, tokens(5), draft_follows=True))
    assert released == [[]]
    _, released = feed(state, draft(0, drafts(1), drafts(3)))
    assert released == [[("a", 0, [1])]]
    _, released = feed(two_requests(), both(0), draft(0, drafts(1)), target(1), draft(1))
    assert released == [[], [("a", 0, [1]), ("b", 0, None)], [], []]
