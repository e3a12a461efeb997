"""The words that a message has of its slots, as columns of which every value was checked.

Nothing of them is trusted: they say where a slot's values lie in the message.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc import wire
from ipc.wire import Kind, LogprobsMode, RowValue, SlotState
from jax_specdec.wording import pluralize


class MessageError(wire.WireError):
    """Bytes that are not a valid message; names the wrong value and what it may be."""


_MAX_CHOSEN = dict.fromkeys(Kind, wire.MAX_CHOSEN) | {Kind.PROMPT: wire.MAX_CHOSEN_OF_ROW}
_EVERY_VALUE = sum(1 << value for value in RowValue)
_LAST_STATE, _LAST_MODE = int(max(SlotState)), int(max(LogprobsMode))
# As plain integers: NumPy takes longer to make one of an enumeration than to compare with it.
_TOKENS, _FIRST_TOKEN = int(SlotState.TOKENS), int(SlotState.PREFILL_FIRST_TOKEN)

_FIELDS = [*wire.SLOT]
_NUM_DRAFTS, _VALUES = map(_FIELDS.index, ("num_drafts", "values"))

# A slot that emits tokens and has neither kept sets, chosen ids nor values: its words but the last.
_MODE, _MOST_MODE = wire.SLOT["mode"].shift, wire.SLOT["mode"].maximum
_COLUMNS, _MOST_COLUMNS = wire.SLOT["columns"].shift, wire.SLOT["columns"].maximum
_PLAIN_BITS = _MOST_MODE << _MODE | _MOST_COLUMNS << _COLUMNS  # of its first word; TOKENS is 0
# Its second word is its number of tokens, and the same again where these have logprobs. Its third
# is its number of drafts: where it has values or chosen ids it is over the limit.
assert wire.SLOT["num_tokens"].shift == wire.SLOT["num_drafts"].shift == 0
assert [wire.SLOT[name].word for name in ("state", "num_tokens", "num_drafts", "generation")] == [
    *range(wire.SLOT_WORDS)
]
_MOST_TOKENS = wire.SLOT["num_tokens"].maximum
_A_TOKEN, _A_TOKEN_WITH_ROW = 1, 1 | 1 << wire.SLOT["num_rows"].shift

# The slot fields as columns [10, 1]: one gather, shift and mask reads them all.
_SLOT_WORD = np.array([field.word for field in wire.SLOT.values()])
_SLOT_SHIFT = np.array([[field.shift] for field in wire.SLOT.values()], np.uint32)
_SLOT_MASK = np.array([[field.maximum] for field in wire.SLOT.values()], np.uint32)

# [state] whether a slot in that state emits tokens; also for states that do not exist.
_EMITS = np.zeros(wire.SLOT["state"].maximum + 1, np.bool_)
_EMITS[[SlotState.TOKENS, SlotState.PREFILL_FIRST_TOKEN]] = True


Starts = Sequence[NDArray[np.int64]]  # [4] of [B], as of `wire.sections`


class SlotFields(NamedTuple):
    """The fields in the words of B slots, checked; [B] int64 each."""

    state: NDArray[np.int64]
    mode: NDArray[np.int64]
    kept: NDArray[np.int64]
    columns: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    num_drafts: NDArray[np.int64]
    values: NDArray[np.int64]
    num_chosen: NDArray[np.int64]
    generation: NDArray[np.int64]
    num_more: NDArray[np.int64]
    sizes: Sequence[int]  # of the sections of the payload, words
    most_drafts: int
    same_columns: int | None
    same_mode: int | None
    starts: Starts | None  # None: `starts_of_alike` makes them


assert SlotFields._fields[: len(wire.SLOT)] == tuple(wire.SLOT)


def read_slots(kind: Kind, most_columns: int, slots: NDArray[np.uint32]) -> SlotFields:
    """The slots' fields, checked.

    Args:
      kind: of the message.
      most_columns: that a row of it may have.
      slots: [B, SLOT_WORDS], their words.

    Raises:
      MessageError: a field's value cannot be.
    """
    fields = read_alike(slots, most_columns) if kind is Kind.TARGET and len(slots) else None
    return fields or _read_any(kind, most_columns, slots)


def read_alike(slots: NDArray[np.uint32], most_columns: int) -> SlotFields | None:
    """The slots, where all emit tokens with as many columns, in one mode and nothing more.

    So are the steps of a full worker whose requests ask for the same. None: `_read_any` decides.
    Of few slots each call of NumPy takes the time of one: numbers of Python are converted in most
    of them, so those are left out, and bytes are compared in a third of it.

    Args:
      slots: [B, SLOT_WORDS], at least one, of a target message.
      most_columns: that a row may have.
    """
    first, number = int(slots[0, 0]), len(slots)
    mode, columns = first >> _MODE & _MOST_MODE, first >> _COLUMNS & _MOST_COLUMNS
    if first & ~_PLAIN_BITS or mode > _LAST_MODE or columns > most_columns:
        return None
    table = slots.T.astype(np.int64, order="C")
    table.setflags(write=False)
    states, tokens_and_rows, num_drafts, generation = table
    common = _common_fields(first, mode, columns, number)
    most_drafts = max(num_drafts.tolist())
    num_tokens = tokens_and_rows & common.most_tokens
    counts = num_tokens.tolist()
    if (
        most_drafts > wire.MAX_DRAFTS
        or 0 in counts
        or max((num_tokens - num_drafts).tolist()) > 1
        or (num_tokens * common.a_token).tobytes() != tokens_and_rows.tobytes()
        or states.tobytes() != common.states
    ):
        return None
    num_tokens.setflags(write=False)
    total = sum(counts)
    return SlotFields(
        common.zeros,
        common.mode,
        common.zeros,
        common.columns,
        num_tokens,
        num_tokens if columns else common.zeros,
        num_drafts,
        common.zeros,
        common.zeros,
        generation,
        common.zeros,
        [total, total, total * columns, total * (columns - 1)] if columns else [total, 0, 0, 0],
        most_drafts,
        columns,
        mode,
        None,
    )


class _CommonFields(NamedTuple):
    """The fields of slots that are alike, [B] int64 each but for `states`."""

    states: bytes  # their first words, [B] int64
    zeros: NDArray[np.int64]
    mode: NDArray[np.int64]
    columns: NDArray[np.int64]
    most_tokens: NDArray[np.int64]
    a_token: NDArray[np.int64]  # what a slot's second word is of one token


@functools.lru_cache(64)
def _common_fields(first: int, mode: int, columns: int, number: int) -> _CommonFields:
    a_token = _A_TOKEN_WITH_ROW if columns else _A_TOKEN
    values = 0, mode, columns, _MOST_TOKENS, a_token
    return _CommonFields(
        all_equal(first, number).tobytes(), *(all_equal(value, number) for value in values)
    )


def starts_of_alike(num_tokens: NDArray[np.int64], columns: int) -> Starts:
    """The starts of slots with as many columns each, and nothing more; [4] of [B]."""
    start = np.add.accumulate(num_tokens) - num_tokens
    if not columns:
        zeros = all_equal(0, len(num_tokens))
        return start, zeros, zeros, zeros
    tops = start * (columns - 1)
    return start, start, tops + start, tops


@functools.lru_cache(64)
def all_equal(value: int, number: int) -> NDArray[np.int64]:
    """[number] int64, read-only."""
    column = np.full(number, value, np.int64)
    column.flags.writeable = False
    return column


def _read_any(kind: Kind, most_columns: int, slots: NDArray[np.uint32]) -> SlotFields:
    """The slots [B, SLOT_WORDS].

    Raises:
      MessageError: a field's value cannot be.
    """
    table = (slots.T[_SLOT_WORD] >> _SLOT_SHIFT & _SLOT_MASK).astype(np.int64)
    table.flags.writeable = False
    fields = dict(zip(wire.SLOT, table, strict=True))
    most: list[int] = table.max(axis=1, initial=0).tolist()
    if not _plainly_right(kind, most_columns, table, most):
        _check_slots(kind, most_columns, fields)
    num_more = fields["num_chosen"]
    if most[_VALUES]:
        num_more = num_more + wire.num_values(fields["values"])
    starts, totals = wire.sections(
        np, fields["num_tokens"], fields["num_rows"], fields["columns"], num_more
    )
    return SlotFields(
        **fields,
        num_more=num_more,
        sizes=totals.tolist(),
        most_drafts=most[_NUM_DRAFTS],
        same_columns=None,
        same_mode=None,
        starts=starts,
    )


def _plainly_right(
    kind: Kind, most_columns: int, table: NDArray[np.int64], most: list[int]
) -> bool:
    """Whether a target message's slots are certainly valid; otherwise `_check_slots` decides.

    This takes half the time, and is enough for a usual step: slots without chosen ids, values of
    rows and a prefill's first token.

    Args:
      table: [10, B] the slots' fields, in the order of `wire.SLOT`.
      most: [10] the largest value of each.
    """
    state, _, _, columns, tokens, rows, drafts, _, _, _ = table
    most_state, most_mode, _, columns_of_one, _, _, most_drafts, most_values, most_chosen, _ = most
    return (
        kind is Kind.TARGET
        and most_state < _FIRST_TOKEN
        and most_mode <= _LAST_MODE
        and columns_of_one <= most_columns
        and most_drafts <= wire.MAX_DRAFTS
        and not (most_chosen or most_values)
        and bool(
            (
                ((state == _TOKENS) == (tokens > 0))
                & (tokens <= drafts + 1)
                & (rows == tokens * (columns > 0))
            ).all()
        )
    )


def _check_slots(kind: Kind, most_columns: int, fields: dict[str, NDArray[np.int64]]) -> None:
    """Raise MessageError for the first invalid field of a slot; `fields` are [B] each."""
    state, mode, columns = fields["state"], fields["mode"], fields["columns"]
    tokens, rows, chosen = fields["num_tokens"], fields["num_rows"], fields["num_chosen"]
    drafts, emits, has_rows = fields["num_drafts"], _EMITS[state], columns > 0
    values = fields["values"]
    first = state == _FIRST_TOKEN
    if kind == Kind.TARGET:  # a + 1 of d + 1; a first token comes with every draft's id
        wrong_tokens = (
            (emits != (tokens > 0)) | (tokens > drafts + 1) | (first & (tokens <= drafts))
        )
    elif kind == Kind.DRAFT:  # all of the drafts or, without logprobs, none
        wrong_tokens = (tokens > 0) & ((tokens != drafts) | ~emits)
    else:
        wrong_tokens = (drafts > 0) | ((tokens > 0) & ~emits)
    checks = (
        (state > _LAST_STATE, "state", state),
        (mode > _LAST_MODE, "mode", mode),
        (fields["kept"] > (kind == Kind.TARGET), "kept", fields["kept"]),
        (columns > most_columns, "columns", columns),
        (drafts > wire.MAX_DRAFTS, "num_drafts", drafts),
        (chosen > has_rows * _MAX_CHOSEN[kind], "num_chosen", chosen),
        (values & ~(has_rows * (kind == Kind.TARGET) * _EVERY_VALUE) > 0, "values", values),
        (wrong_tokens, "num_tokens", tokens),
        (rows != np.where(first, tokens > 0, tokens) * has_rows, "num_rows", rows),
    )
    if not np.concatenate([wrong for wrong, _, _ in checks]).any():
        return
    for wrong, name, values in checks:
        if wrong.any():
            slot = int(wrong.argmax())
            raise MessageError(
                f"slot {slot}: {name} = {int(values[slot])} cannot be (state {int(state[slot])}, "
                f"{pluralize(int(tokens[slot]), 'token')} of "
                f"{pluralize(int(drafts[slot]), 'draft')}, {pluralize(int(rows[slot]), 'row')}, "
                f"columns {int(columns[slot])} of at most {most_columns}; at most "
                f"{wire.MAX_DRAFTS} drafts)"
            )
