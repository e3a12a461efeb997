"""The logprobs of a prompt: what a message of kind PROMPT adds.

A worker runs a prompt in chunks. For a request that asked, each chunk's tokens come with their
rows, from the place on that the request named (the first prompt token has none, as nothing predicts
it), in order, and all before the request's first token. A prompt that is run again after a
preemption sends all its rows again; only new rows are delivered. The step of such a message is that
of the next target message. It is not checked, as the tokens themselves show whether a chunk is
lost.
"""

import numpy as np
from numpy.typing import NDArray

from ipc.wire import LogprobsMode, SlotState
from jax_specdec.records import apply_target
from jax_specdec.records.batch import PromptChunks, RecordBatch
from jax_specdec.records.decode import Message
from jax_specdec.records.processor_state import ProcessorError, ProcessorState, StepLost, frozen
from jax_specdec.records.record import Records
from jax_specdec.requests import Request
from jax_specdec.wording import pluralize


def rows_due(request: Request) -> int:
    """The number of rows that must come before the request's first token."""
    first = request.first_scored
    return 0 if first is None else len(request.packed_prompt) // 4 - first


def take(state: ProcessorState, message: Message) -> tuple[ProcessorState, Records]:
    """Deliver the rows that have not been delivered before.

    Raises:
      StepLost: rows are missing, came twice, or are of other tokens than the prompt's.
      ProcessorError: the request asked for no rows, or for rows of another format.
    """
    speaks = (message.state == SlotState.TOKENS) & (message.num_tokens > 0)
    slots, counters = apply_target.taken(state, message, speaks)
    for slot in slots.tolist():  # few prompts run at once
        _check(state, message, slot)
    columns = state.columns
    before, count = columns.num_prompt[slots], message.num_tokens[slots]
    skip = np.clip(state.admitted.prompt_before[slots] - before, 0, count)
    num_prompt = columns.num_prompt.copy()
    num_prompt[slots] += count
    state = state._replace(
        columns=columns._replace(num_prompt=frozen(num_prompt)), counters=counters
    )
    new = skip < count
    first = np.array([_first_scored(state, slot) for slot in slots.tolist()], np.int64)
    return state, _records(state, message, slots[new], (before + first + skip)[new], skip[new])


def check_complete(
    state: ProcessorState, slots: NDArray[np.intp], count: NDArray[np.int64]
) -> None:
    """Raise StepLost where one of `slots` emits a token before all its prompt's rows have come."""
    missing = (state.admitted.prompt_due[slots] > state.columns.num_prompt[slots]) & (count > 0)
    if missing.any():
        slot = int(slots[missing.argmax()])
        request = state.admitted.requests[slot]
        have, due = int(state.columns.num_prompt[slot]), int(state.admitted.prompt_due[slot])
        raise StepLost(
            f"the first token of request {request.id if request else None!r} came after {have} of "
            f"the {pluralize(due, 'row')} of its prompt's logprobs: the others are lost"
        )


def _check(state: ProcessorState, message: Message, slot: int) -> None:
    """Refuse rows that the slot's request did not ask for, and others than its prompt's next."""
    request = state.admitted.requests[slot]
    assert request is not None  # its phase is RUNNING
    due, have = int(state.admitted.prompt_due[slot]), int(state.columns.num_prompt[slot])
    view = message.slot(slot)
    if not due or state.columns.num_tokens[slot]:
        raise ProcessorError(
            f"slot {slot}: prompt logprobs for request {request.id!r}, which has none to come"
        )
    params = request.params
    expected = (params.prompt_logprobs, params.num_prompt_chosen, params.logprobs_mode)
    got = (int(message.columns[slot]) - 1, int(message.num_chosen[slot]), int(message.mode[slot]))
    if got != expected:
        raise ProcessorError(
            f"slot {slot}: request {request.id!r} asked for prompt logprobs with "
            f"K = {expected[0]}, {pluralize(expected[1], 'chosen id')} and mode "
            f"{expected[2].name}; the message has K = {got[0]}, "
            f"{pluralize(got[1], 'chosen id')} and mode {LogprobsMode(got[2]).name}"
        )
    place = _first_scored(state, slot) + have
    next_ids = request.prompt_token_ids[place : place + len(view.token_ids)]
    if view.token_ids.tolist() != list(next_ids):
        raise StepLost(
            f"slot {slot}: the logprobs of {pluralize(len(view.token_ids), 'prompt token')} came "
            f"where tokens {place} and on of request {request.id!r} were next: a chunk is lost, "
            "or came twice"
        )


def _first_scored(state: ProcessorState, slot: int) -> int:
    """Where the rows of the prompt in a slot begin, whose request asked for some."""
    request = state.admitted.requests[slot]
    first = None if request is None else request.first_scored
    assert first is not None
    return first


def _records(
    state: ProcessorState,
    message: Message,
    slots: NDArray[np.intp],
    start: NDArray[np.int64],
    skip: NDArray[np.int64],
) -> Records:
    """Records of `slots` [N], whose rows begin at `start` [N] after `skip` [N] known ones."""
    if not slots.size:
        return Records()
    batch = RecordBatch.without_tokens(
        step=message.step,
        requests=state.admitted.requests,
        slots=slots,
        generation=state.admitted.generation[slots],
        cumulative_logprob=state.columns.cumulative_logprob[slots],
        prompt=PromptChunks(message, start, skip),
    )
    return Records((batch,))
