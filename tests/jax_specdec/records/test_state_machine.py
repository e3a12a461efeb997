"""The processor against its slow reference, driven through random lives of its slots.

The same machine, given a processor with one deliberate fault, must notice.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings

from ipc.wire import Kind
from jax_specdec.records import output_processor
from jax_specdec.records.output_processor import Phase, ProcessorError
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


def step_of_changed(change):
    """A processor whose `step` sees `change(state, message)`: a state and a message."""
    return {"step": lambda state, message: output_processor.step(*change(state, message))}


def ignoring_generations(state, message):
    current = state.admitted.generation[: message.num_slots]
    return state, replace(message, generation=np.maximum(current, 0))


def joining_drafts_of_any_step(state, message):
    if message.kind is Kind.DRAFT and state.waiting is not None:
        message = replace(message, step=state.waiting.step)
    return state, message


def delivering_after_the_end(state, message):
    phase = np.where(state.columns.phase == Phase.ENDED, Phase.RUNNING, state.columns.phase)
    return replace(state, columns=replace(state.columns, phase=phase)), message


def release_counting_earlier_steps_twice(state, slot):
    after = output_processor.release(state, slot)
    return replace(after, past=after.past + state.admitted.earlier[slot])


def abort_leaving_the_waiting_record(state, request_id):
    after, records = output_processor.abort(replace(state, waiting=None), request_id)
    return replace(after, waiting=state.waiting), records


@pytest.mark.parametrize(
    "parts",
    [
        step_of_changed(ignoring_generations),
        step_of_changed(joining_drafts_of_any_step),
        step_of_changed(delivering_after_the_end),
        {"release": release_counting_earlier_steps_twice},
        {"abort": abort_leaving_the_waiting_record},
    ],
)
def test_the_machine_notices_a_fault(parts):
    """Within the very lives in which the product and the reference agree."""

    class Faulty(Machine):
        product = SimpleNamespace(**{**vars(PRODUCT), **parts})

    with pytest.raises((AssertionError, ProcessorError)):
        live_often(Faulty, range(60))
