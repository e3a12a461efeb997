"""Giving a slot of the processor's state to a request, and freeing it."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records import stop_rules
from jax_specdec.records.batch import FinishReason, Statistics
from jax_specdec.records.processor_state import (
    Admitted,
    ProcessorError,
    ProcessorState,
    Progress,
    SlotColumns,
    SlotPhase,
    frozen,
    is_newer,
    row_format,
    totals,
)
from jax_specdec.records.prompt_logprobs import rows_due
from jax_specdec.requests import Request
from jax_specdec.wording import pluralize

ItemT = TypeVar("ItemT")


def admit(
    state: ProcessorState,
    slot: int,
    generation: int,
    request: Request,
    *,
    prefill: bool = False,
    handed_over: Progress | None = None,
) -> ProcessorState:
    """Give `slot` to `request`: from now on, messages of `generation` are about it.

    Args:
      generation: 32 bits, newer than every earlier one of the slot in serial-number arithmetic
        (RFC 1982), so a counter may wrap around.
      prefill: this node only prefills: the request ends here after its first token, with the
        reason `PREFILL_HANDOVER` unless that token ends it anyway.
      handed_over: what the request has delivered already, on a prefill node or before a preemption.

    Raises:
      ProcessorError: the slot is taken, the generation is not newer, the id is in use, or no token
        is left to emit.
    """
    admitted, columns, params = state.admitted, state.columns, request.params
    _check_slot(state, slot)
    holder = admitted.requests[slot]
    if holder is not None:
        raise ProcessorError(
            f"slot {slot} is taken by request {holder.id!r} "
            f"({SlotPhase(int(columns.phase[slot])).name.lower()}): release it first"
        )
    if not 0 <= generation < 2**32:
        raise ProcessorError(f"generation = {generation} must be from 0 to {2**32 - 1}")
    last = int(admitted.generation[slot])
    if last >= 0 and not is_newer(generation, last):
        raise ProcessorError(
            f"slot {slot} has had generation {last}, so {generation} is used up: "
            "count up whenever a slot is given to a request"
        )
    if any(other is not None and other.id == request.id for other in admitted.requests):
        raise ProcessorError(f"request id {request.id!r} holds another slot: ids are unique")
    progress = handed_over or Progress()
    _check_progress(request, progress)
    done = len(progress.token_ids)
    ends_here = prefill and params.max_tokens > done + 1
    limit_reason = FinishReason.PREFILL_HANDOVER if ends_here else FinishReason.LENGTH
    row = row_format(
        params.num_columns,
        len(params.extra_token_ids),
        params.logprobs_mode,
        params.kept_token_ids,
        params.row_values,
    )
    history = stop_rules.history_needed(params)
    tail = columns.tail
    if history > tail.shape[1]:
        tail = np.pad(tail, ((0, 0), (history - tail.shape[1], 0)))
    if history:
        newest = progress.token_ids[-tail.shape[1] :]
        empty = (0,) * (tail.shape[1] - len(newest))
        tail = _with(tail, slot, np.array(empty + newest, np.int32))
    prompt_due = _with(admitted.prompt_due, slot, 0 if done else rows_due(request))
    return state._replace(
        admitted=Admitted(
            requests=_with_item(admitted.requests, slot, request),
            generation=_with(admitted.generation, slot, generation),
            limit=_with(admitted.limit, slot, done + 1 if ends_here else params.max_tokens),
            limit_reason=_with(admitted.limit_reason, slot, limit_reason),
            row_format=_with(admitted.row_format, slot, row),
            handed_over=_with(admitted.handed_over, slot, done),
            earlier=_with_item(admitted.earlier, slot, progress.statistics),
            prompt_due=prompt_due,
            prompt_before=_with(admitted.prompt_before, slot, progress.num_prompt_rows),
            any_prompt_due=bool(prompt_due.any()),
            history=_with(admitted.history, slot, history),
            stop_keys=frozen(stop_rules.with_slot(admitted.stop_keys, slot, params)),
        ),
        columns=SlotColumns(
            phase=_with(columns.phase, slot, SlotPhase.RUNNING),
            num_tokens=_with(columns.num_tokens, slot, done),
            cumulative_logprob=_with(
                columns.cumulative_logprob, slot, progress.cumulative_logprob or 0.0
            ),
            outcomes=columns.outcomes.without(slot),
            tail=tail,
            num_prompt=_with(columns.num_prompt, slot, 0),
        ),
    )


def release(state: ProcessorState, slot: int) -> ProcessorState:
    """Free `slot`, in whatever phase its request is, without a record; a free slot stays free.

    The request's statistics join the past, its records that wait for a draft message still come,
    and later messages of its generation are counted as surplus.
    """
    _check_slot(state, slot)
    if state.admitted.requests[slot] is None:
        return state
    admitted, columns = state.admitted, state.columns
    prompt_due = _with(admitted.prompt_due, slot, 0)
    return state._replace(
        admitted=replace(
            admitted,
            requests=_with_item(admitted.requests, slot, None),
            handed_over=_with(admitted.handed_over, slot, 0),
            earlier=_with_item(admitted.earlier, slot, Statistics()),
            prompt_due=prompt_due,
            any_prompt_due=bool(prompt_due.any()),
            history=_with(admitted.history, slot, 0),
            stop_keys=frozen(stop_rules.without_slot(admitted.stop_keys, slot)),
        ),
        columns=columns._replace(
            phase=_with(columns.phase, slot, SlotPhase.FREE),
            num_tokens=_with(columns.num_tokens, slot, 0),
            outcomes=columns.outcomes.without(slot),
        ),
        past=state.past + totals(admitted, columns).of_stay(slot),
    )


def _with(column: NDArray[Any], slot: int, value: Any) -> NDArray[Any]:
    changed = column.copy()
    changed[slot] = value
    return frozen(changed)


def _with_item(items: tuple[ItemT, ...], slot: int, item: ItemT) -> tuple[ItemT, ...]:
    return (*items[:slot], item, *items[slot + 1 :])


def _check_slot(state: ProcessorState, slot: int) -> None:
    if not 0 <= slot < state.num_slots:
        raise ProcessorError(f"slot {slot} does not exist: there are {state.num_slots}")


def _check_progress(request: Request, progress: Progress) -> None:
    """Refuse a request that has ended, or whose cumulative logprob cannot be continued."""
    params, tokens = request.params, list(progress.token_ids)
    if len(tokens) >= params.max_tokens:
        raise ProcessorError(
            f"request {request.id!r} has emitted {len(tokens)} of "
            f"{pluralize(params.max_tokens, 'token')}: nothing is left to emit"
        )
    if tokens and tokens[-1] in params.stop_token_ids:
        raise ProcessorError(f"request {request.id!r} has ended with stop token {tokens[-1]}")
    if stop_rules.sequence_ending(params, tokens, len(tokens)) is not None:
        raise ProcessorError(f"request {request.id!r} has ended with a stop sequence")
    if tokens and params.num_columns and progress.cumulative_logprob is None:
        raise ProcessorError(
            f"request {request.id!r} asked for logprobs: its progress needs cumulative_logprob"
        )
