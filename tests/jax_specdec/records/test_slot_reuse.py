"""A slot from one request to the next: whose messages, records and drafts are whose."""

import pytest

from ipc.wire import Kind, SlotState
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import encode
from jax_specdec.records.output_processor import (
    ProcessorState,
    abort,
    admit,
    flush,
    release,
    step,
)
from jax_specdec.records.processor_state import ProcessorError
from tests.support.processor_messages import draft, drafts, request, silent, target, tokens


def two_waiting():
    """The requests a and b, each with a record that waits for the drafts of step 0."""
    state = ProcessorState.empty(2)
    for slot, name in enumerate("ab"):
        state = admit(state, slot, 1, request(name, draft_logprobs=True))
    slots = tokens(5, 6, drafts=2), tokens(7, drafts=2)
    state, _ = step(state, target(0, *slots, draft_follows=True))
    return state


GENERATIONS = pytest.mark.parametrize("generation", [0, 1, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1])


def messages_about_slot_1(generation):
    """Tokens of a request, and rows of its prompt."""
    slots = [silent(SlotState.STOPPED), tokens(5, generation=generation)]
    return target(0, *slots), decode(encode(Kind.PROMPT, 0, slots))


@GENERATIONS
def test_a_slot_that_had_no_request_is_never_spoken_of(generation):
    for message in messages_about_slot_1(generation):
        with pytest.raises(ProcessorError, match=f"slot 1: .* {generation}, but the .* is -1"):
            step(ProcessorState.empty(2), message)


@GENERATIONS
def test_what_comes_behind_a_release_is_surplus(generation):
    state = release(admit(ProcessorState.empty(2), 1, generation, request("past")), 1)
    for message in messages_about_slot_1(generation):
        state, records = step(state, message)
        assert len(records) == 0
    assert (state.counters.surplus_tokens, state.counters.late_slots) == (2, 0)


DRAFTS_OF_BOTH = draft(0, drafts(1, 2), drafts(3, 4))


def next_one(state, slot, generation):
    """The state after the request of a slot left, and another came."""
    return admit(release(state, slot), slot, generation, request("next", draft_logprobs=True))


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (lambda state: abort(state, "next"), FinishReason.ABORT),
        (lambda state: flush(state, FinishReason.WORKER_LOST), FinishReason.WORKER_LOST),
    ],
    ids=["abort", "flush"],
)
@pytest.mark.parametrize("slot", [0, 1])
def test_a_waiting_record_ends_with_its_own_request_only(ending, reason, slot):
    state = two_waiting()
    state, records = ending(next_one(state, slot, 2))
    (ended,) = [record for record in records if record.request_id == "next"]
    assert (ended.finish_reason, ended.generation, ended.token_ids.tolist()) == (reason, 2, [])
    if reason is FinishReason.ABORT:
        assert len(records) == 1
        state, records = step(state, DRAFTS_OF_BOTH)
        assert [record.draft.token_ids.tolist() for record in records] == [[1, 2], [3, 4]]
    of_before = {record.request_id: record for record in records if record.token_ids.size}
    left, stayed = ("a", "b") if slot == 0 else ("b", "a")
    assert {name: record.token_ids.tolist() for name, record in of_before.items()} == {
        "a": [5, 6], "b": [7],
    }  # fmt: skip
    assert of_before[left].finish_reason is None
    assert of_before[stayed].finish_reason is (None if reason is FinishReason.ABORT else reason)
    num_ended = 1 if reason is FinishReason.ABORT else 2
    assert sum(state.counters.finished) == state.counters.finished[reason - 1] == num_ended


def test_abort_ends_the_record_of_its_request_that_waits():
    state = two_waiting()
    state, (ended,) = abort(state, "a")
    assert (ended.finish_reason, ended.token_ids.tolist()) == (FinishReason.ABORT, [5, 6])
    state, (record,) = step(state, DRAFTS_OF_BOTH)
    assert (record.request_id, record.draft.token_ids.tolist()) == ("b", [3, 4])
    assert state.counters.late_drafts == 1
