"""The words that a message has of its slots, as columns of which every value was checked.

Nothing of them is trusted: they say where a slot's values lie in the message.
"""

import functools
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
# Halves of its words: counts; drafts, with the row values above them; chosen ids.
_NUM_TOKENS, _NUM_ROWS, _DRAFTS_AND_VALUES, _NUM_CHOSEN = (
    2 * wire.SLOT[name].word + wire.SLOT[name].shift // 16
    for name in ("num_tokens", "num_rows", "num_drafts", "num_chosen")
)

# The slot fields as columns [10, 1]: one gather, shift and mask reads them all.
_SLOT_WORD = np.array([field.word for field in wire.SLOT.values()])
_SLOT_SHIFT = np.array([[field.shift] for field in wire.SLOT.values()], np.uint32)
_SLOT_MASK = np.array([[field.maximum] for field in wire.SLOT.values()], np.uint32)

# [state] whether a slot in that state emits tokens; also for states that do not exist.
_EMITS = np.zeros(wire.SLOT["state"].maximum + 1, np.bool_)
_EMITS[[SlotState.TOKENS, SlotState.PREFILL_FIRST_TOKEN]] = True


class SlotFields(NamedTuple):
    """What the words of B slots say, checked."""

    fields: dict[str, NDArray[np.int64]]  # [B] each, and `num_more`
    starts: tuple[NDArray[np.int64], ...]  # [B] each, as of `wire.sections`
    sizes: list[int]  # of the sections of the payload, words
    most_drafts: int
    same_columns: int | None


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
    table = slots.view(np.uint16).T.astype(np.int64, order="C")
    table.setflags(write=False)
    num_tokens, num_drafts = table[_NUM_TOKENS], table[_DRAFTS_AND_VALUES]
    zeros = all_equal(0, number)
    rows = num_tokens if columns else zeros
    most_drafts = int(num_drafts[num_drafts.argmax()])  # with values it is more than can be
    more = num_tokens - num_drafts
    if (
        most_drafts > wire.MAX_DRAFTS
        or int(more[more.argmax()]) > 1
        or np.count_nonzero(num_tokens) != number
        or np.count_nonzero(table[_NUM_CHOSEN])
        or table[_NUM_ROWS].tobytes() != rows.tobytes()
        or slots[:, 0].tobytes() != first.to_bytes(wire.WORD_BYTES, "little") * number
    ):
        return None
    ends = np.add.accumulate(num_tokens)
    start, total = ends - num_tokens, int(ends[-1])
    if columns:
        tops = start * all_equal(columns - 1, number)
        starts = start, start, tops + start, tops
        sizes = [total, total, total * columns, total * (columns - 1)]
    else:
        starts, sizes = (start, zeros, zeros, zeros), [total, 0, 0, 0]
    generation = slots[:, 3].astype(np.int64)
    generation.setflags(write=False)
    fields = {
        "state": zeros,
        "mode": all_equal(mode, number),
        "kept": zeros,
        "columns": all_equal(columns, number),
        "num_tokens": num_tokens,
        "num_rows": rows,
        "num_drafts": num_drafts,
        "values": zeros,
        "num_chosen": zeros,
        "generation": generation,
        "num_more": zeros,
    }
    return SlotFields(fields, starts, sizes, most_drafts, columns)


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
    fields["num_more"] = num_more
    return SlotFields(fields, starts, totals.tolist(), most[_NUM_DRAFTS], None)


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
