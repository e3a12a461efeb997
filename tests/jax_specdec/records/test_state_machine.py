"""The processor against its slow reference, driven through random lives of its slots.

The same machine, given a processor with one deliberate fault, must notice: each fault below is a
trap that the seed system fell into, or a way to get the contract wrong.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings

from ipc.wire import Kind
from jax_specdec.records import apply_target, output_processor, prompt_logprobs
from jax_specdec.records.output_processor import ProcessorError
from jax_specdec.records.statistics import Statistics
from tests.support.processor_machine import PRODUCT, Machine, live

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def live_often(machine, seeds):
    for seed in seeds:
        live(machine(), seed)


def test_random_lives_of_the_slots():
    live_often(Machine, range(60))


@pytest.mark.slow
def test_more_random_lives_of_the_slots():
    live_often(Machine, range(60, 1000))


@pytest.mark.slow
class TestMachineAtLength(Machine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=50, deadline=None)


# --- Negative controls: the machine must catch each of these processors. ---


def wrap_step(change):
    """A processor whose `step` sees `change(state, message)` in place of the message."""

    def step(state, message):
        return output_processor.step(state, change(state, message))

    return {"step": step}


def ignores_generations(monkeypatch):
    def change(state, message):
        current = state.admitted.generation[: message.num_slots]
        return replace(message, generation=np.maximum(current, 0))

    return wrap_step(change)


def joins_drafts_of_any_step(monkeypatch):
    def change(state, message):
        if message.kind is Kind.DRAFT and state.waiting is not None:
            return replace(message, step=state.waiting.step)
        return message

    return wrap_step(change)


def joins_drafts_by_list_position(monkeypatch):
    original = output_processor._join

    def join(batch, draft):
        positions = np.arange(len(batch))
        generation = draft.generation.copy()
        generation[positions] = batch.generation
        moved, late = original(
            replace(batch, slots=positions), replace(draft, generation=generation)
        )
        return replace(moved, slots=batch.slots), late

    monkeypatch.setattr(output_processor, "_join", join)
    return {}


def drops_the_drafts_of_a_step_in_which_a_request_finished(monkeypatch):
    original = output_processor._join

    def join(batch, draft):
        joined, late = original(batch, draft)
        return (batch, late) if batch.finish_reason.any() else (joined, late)

    monkeypatch.setattr(output_processor, "_join", join)
    return {}


def takes_any_rows_of_drafts(monkeypatch):
    original = apply_target.check_rows

    def check_rows(message, *rest):
        if message.kind is Kind.TARGET:
            original(message, *rest)

    monkeypatch.setattr(apply_target, "check_rows", check_rows)
    return {}


def adds_up_the_logprobs_of_cut_tokens(monkeypatch):
    original = apply_target.cumulative

    def cumulative(before, message, slots, kept):
        return original(before, message, slots, message.num_rows[slots])

    monkeypatch.setattr(apply_target, "cumulative", cumulative)
    return {}


def takes_the_kept_sets_of_the_slot_before(monkeypatch):
    def change(state, message):
        return replace(message, kept_start=np.maximum(message.kept_start - 1, 0))

    return wrap_step(change)


def forgets_earlier_steps_in_stop_sequences(monkeypatch):
    monkeypatch.setattr(apply_target, "tail", lambda state, *_: state.columns.tail)
    return {}


def delivers_what_comes_after_the_end(monkeypatch):
    def step(state, message):
        ended = state.columns.phase == output_processor.Phase.ENDED
        phase = np.where(ended, output_processor.Phase.RUNNING, state.columns.phase)
        return output_processor.step(
            replace(state, columns=replace(state.columns, phase=phase)), message
        )

    return {"step": step}


def admitting(change):
    """A processor that admits `change(request, handed_over)` in place of the two."""

    def admit(state, slot, generation, request, *, prefill, handed_over):
        request, handed_over = change(request, handed_over)
        return output_processor.admit(
            state, slot, generation, request, prefill=prefill, handed_over=handed_over
        )

    return {"admit": admit}


def counts_the_handed_over_tokens_for_nothing(monkeypatch):
    def longer(request, handed_over):
        most = request.params.max_tokens + len(handed_over.token_ids)
        return replace(request, params=replace(request.params, max_tokens=most)), handed_over

    return admitting(longer)


def forgets_the_statistics_before_a_preemption(monkeypatch):
    return admitting(lambda request, over: (request, replace(over, statistics=Statistics())))


def counts_the_steps_before_a_preemption_twice(monkeypatch):
    def release(state, slot):
        earlier = state.admitted.earlier[slot]
        after = output_processor.release(state, slot)
        return replace(after, past=after.past + earlier)

    return {"release": release}


def delivers_a_prompts_logprobs_again(monkeypatch):
    return admitting(lambda request, over: (request, replace(over, num_prompt_rows=0)))


def takes_lost_rows_of_a_prompt_for_granted(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "check_complete", lambda *_: None)
    return {}


def takes_any_rows_for_the_prompts_next_ones(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "_check", lambda *_: None)
    return {}


def leaves_the_waiting_record_behind_on_abort(monkeypatch):
    def abort(state, request_id):
        after, records = output_processor.abort(replace(state, waiting=None), request_id)
        return replace(after, waiting=state.waiting), records

    return {"abort": abort}


def takes_lost_steps_for_granted(monkeypatch):
    return wrap_step(
        lambda state, message: (
            replace(message, step=state.next_step) if message.kind is Kind.TARGET else message
        )
    )


def counts_accepted_drafts_after_the_cut(monkeypatch):
    original = apply_target.acceptance

    def acceptance(columns, slots, emitted):
        return original(columns, slots, replace(emitted, count=np.minimum(emitted.count, 2)))

    monkeypatch.setattr(apply_target, "acceptance", acceptance)
    return {}


@pytest.mark.parametrize(
    "fault",
    [
        ignores_generations,
        joins_drafts_of_any_step,
        joins_drafts_by_list_position,
        drops_the_drafts_of_a_step_in_which_a_request_finished,
        takes_any_rows_of_drafts,
        adds_up_the_logprobs_of_cut_tokens,
        takes_the_kept_sets_of_the_slot_before,
        forgets_earlier_steps_in_stop_sequences,
        delivers_what_comes_after_the_end,
        counts_the_handed_over_tokens_for_nothing,
        forgets_the_statistics_before_a_preemption,
        counts_the_steps_before_a_preemption_twice,
        delivers_a_prompts_logprobs_again,
        takes_lost_rows_of_a_prompt_for_granted,
        takes_any_rows_for_the_prompts_next_ones,
        leaves_the_waiting_record_behind_on_abort,
        takes_lost_steps_for_granted,
        counts_accepted_drafts_after_the_cut,
    ],
    ids=lambda fault: fault.__name__,
)
def test_the_machine_notices_a_processor_that(fault, monkeypatch):
    """Within the very lives in which the product and the reference agree."""
    parts = fault(monkeypatch)

    class Faulty(Machine):
        product = SimpleNamespace(**{**vars(PRODUCT), **parts})

    with pytest.raises((AssertionError, ProcessorError)):
        live_often(Faulty, range(60))
