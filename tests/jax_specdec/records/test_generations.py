"""Slots and their generations: which request a message is about, also around the wrap at 2^32."""

import numpy as np
import pytest

from ipc.wire import SlotState
from jax_specdec.records.output_processor import (
    ProcessorError,
    ProcessorState,
    admit,
    release,
    step,
)
from jax_specdec.records.processor_state import is_newer
from tests.support.processor_messages import admitted, request, run, silent, target, tokens

pytestmark = pytest.mark.fast


def test_an_old_generation_never_touches_the_new_request():
    state = admitted(stop_token_ids=(6,), id="old")
    state, _ = run(state, target(0, tokens(6)))
    state = admit(release(state, 0), 0, 2, request("new", stop_token_ids=(6,)))
    before = state.columns.num_tokens.copy()
    state, released = run(
        state, target(1, tokens(6)), target(2, silent(SlotState.PREEMPTED)), target(3, silent())
    )
    assert released == [[], [], []]
    assert state.counters.late_slots == 2
    np.testing.assert_array_equal(state.columns.num_tokens, before)
    _, ((record,),) = run(state, target(4, tokens(7, generation=2)))
    assert (record.request_id, record.token_ids.tolist()) == ("new", [7])


def test_a_message_about_a_generation_that_was_never_admitted_is_an_error():
    with pytest.raises(ProcessorError, match="generation 2, but the last one admitted is 1"):
        step(admitted(), target(0, tokens(5, generation=2)))
    with pytest.raises(ProcessorError, match="the last one admitted is -1"):
        step(ProcessorState.empty(1), target(0, tokens(5)))
    step(ProcessorState.empty(1), target(0, silent(SlotState.STOPPED)))


def test_admit_and_release_check_the_slot_and_the_generation():
    state = admitted(num_slots=2)
    with pytest.raises(ProcessorError, match=r"slot 0 is taken by request 'r' \(running\)"):
        admit(state, 0, 2, request("other"))
    with pytest.raises(ProcessorError, match="request id 'r' holds another slot"):
        admit(state, 1, 1, request("r"))
    with pytest.raises(ProcessorError, match="slot 2 does not exist"):
        admit(state, 2, 1, request("other"))
    with pytest.raises(ProcessorError, match="generation = 4294967296 must be"):
        admit(state, 1, 2**32, request("other"))
    state = release(state, 0)
    assert release(state, 0) is state  # a free slot stays free
    for used in (1, 0):
        with pytest.raises(ProcessorError, match="has had generation 1"):
            admit(state, 0, used, request("other"))
    admit(state, 0, 2, request("other"))


def test_newer_is_decided_on_the_circle_of_32_bits():
    assert is_newer(1, 0)
    assert is_newer(0, 2**32 - 1)
    assert is_newer(2**31 - 1, 0)
    assert not is_newer(2**31, 0)  # half way round: neither is newer
    assert not is_newer(0, 2**31)
    assert not is_newer(5, 5)
    assert not is_newer(2**32 - 1, 0)


def test_old_and_future_generations_around_the_wrap():
    state = admit(ProcessorState.empty(1), 0, 2**32 - 1, request("old"))
    with pytest.raises(ProcessorError, match="about generation 0, but the last one admitted is"):
        step(state, target(0, tokens(5, generation=0)))
    state = admit(release(state, 0), 0, 0, request("new"))
    for n, late in enumerate((2**32 - 1, 2**32 - 2, 2**31 + 1)):
        state, records = step(state, target(n, tokens(5, generation=late)))
        assert (len(records), state.counters.late_slots) == (0, n + 1)
    state, (record,) = step(state, target(3, tokens(5, generation=0)))
    assert (record.request_id, record.token_ids.tolist()) == ("new", [5])
    for used in (0, 2**32 - 1, 2**31):
        with pytest.raises(ProcessorError, match="is used up"):
            admit(release(state, 0), 0, used, request("another"))


def test_a_message_about_no_live_request_changes_nothing_but_a_counter():
    """Neither the old request's tokens, nor its preemption, nor its recovery stop."""
    state = admit(ProcessorState.empty(1), 0, 1, request("old", logprobs=0))
    state = admit(release(state, 0), 0, 2, request("new", logprobs=0))
    before = [getattr(state.columns, name).tolist() for name in state.columns.__slots__]
    for n, slot in enumerate(
        [tokens(5, columns=1), tokens(6, 7, columns=1), silent(3), silent(4), silent(1), silent(2)]
    ):
        state, records = step(state, target(n, slot))
        assert len(records) == 0
    after = [getattr(state.columns, name).tolist() for name in state.columns.__slots__]
    assert after == before
    assert state.counters.late_slots == 4
