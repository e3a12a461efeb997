"""The layout of one message, defined once for the packer on the device and for the decoder.

There is one message per step and kind, and it carries every slot of the batch. It is a contiguous
array of little-endian 32-bit words::

    header   HEADER_WORDS words        what, which step, how long
    slots    SLOT_WORDS words a slot   state, counts, generation
    payload  token ids    [tokens]           every token of every slot, slot after slot
             token ranks  [rows]             a row is a token that has logprobs
             logprobs     [rows, columns + chosen + values]  per slot, row-major, float32 bits
             top-K ids    [rows, columns - 1]       per slot, row-major
             kept counts  [kept rows]      a kept row is an emitted token of a slot that asked
             kept masses  [kept rows]      float32 bits
             kept ids     [sum of counts]  row after row, ascending within each

Only what exists travels: a slot without logprobs adds its token ids and nothing else, and a slot's
rows are as wide as its own request asked for. Column 0 of `logprobs` is the token's own logprob
(its id is among the token ids), columns 1.. are the top K, and the logprobs of the chosen token ids
follow (the reader knows which ids its request chose), then the values of the row that its slot's
bits name (`RowValue`), in their order. A kept count is the number of token ids that
the row's distribution kept, or a mark instead of ids: `KEPT_ALL` or `KEPT_MANY`. The kept mass is
the logarithm of their share.

The functions take the array namespace `xp`, numpy or jax.numpy, and work on NumPy arrays as on
traced JAX arrays. This module imports neither, so a consumer process stays free of jax.
Axes: B slots.

The layout follows the seed system's message (FastDeploy, `speculate_logprob_msg.h`), in which kind
and column count share one word; here both are range-checked.
"""

import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from ipc.field_docs import with_field_docs

_Array = Any  # numpy.ndarray or jax.Array: this module computes on both and imports neither

MAGIC = 0x4C53  # "SL": speculative logprobs
VERSION = 4
WORD_BYTES = 4

MAX_TOP_K = 512  # columns 1..K of a row
MAX_CHOSEN = 128  # token ids beside the top K that a request may name for all rows
MAX_CHOSEN_OF_ROW = 512  # that it may name for one row of its prompt
MAX_KEPT = 1024  # kept token ids of a row; more are a mark
PROMPT_WORDS = 1 << 18  # of one chunk of a prompt, unless a step can have more
MAX_DRAFTS = 64  # of a slot and step: far beyond what pays, and each is a row of every step

# What a kept count says where no ids follow, as int32.
KEPT_ALL = -1  # no token of the vocabulary was cut
KEPT_MANY = -2  # some were, and more than MAX_KEPT are left

if sys.byteorder != "little":  # pragma: no cover - every platform of JAX is little-endian
    raise ImportError("the message layout is little-endian; this machine is big-endian")


class WireError(ValueError):
    """A value that does not fit the layout, or bytes that are not a message."""


class Kind(IntEnum):
    """The kind of a message. Target and draft have the numbers of the seed system."""

    TARGET = 3  # emitted tokens, logprobs under the target model
    DRAFT = 4  # the drafts verified in this step, logprobs under the draft model
    PROMPT = 5  # logprobs of prompt tokens


class SlotState(IntEnum):
    """The event of a slot in this step."""

    TOKENS = 0  # it emitted tokens
    NOTHING = 1  # nothing this step: its prompt is still being prefilled
    STOPPED = 2  # empty, or its request has ended
    PREEMPTED = 3  # its request lost its place and must be scheduled again
    RECOVERY_STOP = 4  # its request cannot go on: finish it with an error
    PREFILL_FIRST_TOKEN = 5  # first token with logprobs, then draft token ids alone


class LogprobsMode(IntEnum):
    """The distribution from which a request's logprobs are taken."""

    RAW = 0  # the model's logits
    SCALED = 1  # divided by the temperature
    PROCESSED = 2  # after temperature, top-k, top-p and min-p, renormalized


class RowValue(IntEnum):
    """Values of a row's distribution, which a request may ask for; each is a bit of `values`."""

    ENTROPY = 0
    LOG_SUM_EXP = 1
    DIGEST_LOW = 2  # of all logits of the row as the model gave them: the lower half of 64 bits
    DIGEST_HIGH = 3


@with_field_docs
class Field(NamedTuple):
    """The place of an unsigned integer inside a group of words.

    Attributes:
      word: which of the group.
      shift: of its lowest bit.
      bits: how many.
    """

    word: int
    shift: int
    bits: int

    @property
    def maximum(self) -> int:
        """The largest value that fits."""
        return (1 << self.bits) - 1

    def get(self, words: _Array) -> _Array:
        """Returns this field of `words` [..., n] uint32, as uint32 [...]."""
        return (words[..., self.word] >> self.shift) & self.maximum


HEADER_WORDS = 9
HEADER = {
    "version": Field(0, 0, 16),
    "magic": Field(0, 16, 16),
    "kind": Field(1, 0, 8),
    "max_num_logprobs": Field(1, 8, 16),
    "running": Field(2, 0, 1),
    "draft_follows": Field(2, 1, 1),
    "error": Field(2, 2, 1),
    "error_checks": Field(2, 8, 8),
    "digest": Field(2, 16, 16),  # of what decides the rows' bits; 0: the batch does, too
    "num_slots": Field(3, 0, 32),
    "num_words": Field(4, 0, 32),
    "step_low": Field(5, 0, 32),
    "step_high": Field(6, 0, 32),
    "process_rank": Field(7, 0, 32),
    "weights_version": Field(8, 0, 32),  # of the weights that made this step's rows
}

SLOT_WORDS = 4
SLOT = {
    "state": Field(0, 0, 8),
    "mode": Field(0, 8, 7),
    "kept": Field(0, 15, 1),  # its emitted tokens have kept sets
    "columns": Field(0, 16, 16),  # 0: no logprobs, K + 1 otherwise
    "num_tokens": Field(1, 0, 16),
    "num_rows": Field(1, 16, 16),  # tokens that have logprobs
    "num_drafts": Field(2, 0, 8),  # drafts that were proposed for this step
    "values": Field(2, 8, 8),  # bits of `RowValue`: what each row has besides its logprobs
    "num_chosen": Field(2, 16, 16),  # chosen token ids per row
    "generation": Field(3, 0, 32),
}

assert HEADER_WORDS * WORD_BYTES <= 64, "the header has at most 64 bytes"
assert SLOT_WORDS * WORD_BYTES <= 16, "a slot has at most 16 bytes"


class DeviceCheck(IntEnum):
    """Checks on the device where a message is packed; a failed one sets a bit of `error_checks`."""

    SLOT_COUNTS = 0  # more tokens, rows, drafts or kept ids than there can be, or rows for none
    TOKEN_ID = 1  # an emitted id outside the vocabulary
    SLOT_FIELDS = 2  # a state, mode, column, chosen count or kept flag that does not exist
    WORDS = 3  # the message is longer than the bucket that the host chose


def fits(name: str, value: int, field: Field) -> int:
    """Returns `value` if it fits `field`. For values known on the host.

    Raises:
      WireError: it does not fit; the error names the value and the limits.
    """
    if not 0 <= value <= field.maximum:
        raise WireError(
            f"{name} = {value} does not fit its {field.bits} bits of the message "
            f"(0 to {field.maximum}); send a value inside these limits"
        )
    return value


def words_of(
    xp: Any, fields: dict[str, Field], num_words: int, values: dict[str, _Array]
) -> _Array:
    """Puts `values` (uint32 arrays of one shape [...]) into words [..., num_words] uint32.

    The values must fit. Callers check them: `fits` on the host, `DeviceCheck` on the device.

    Raises:
      KeyError: a field name is missing or unknown.
    """
    if values.keys() != fields.keys():
        raise KeyError(f"fields {sorted(values.keys() ^ fields.keys())} are missing or unknown")
    words = [None] * num_words
    for name, field in fields.items():
        part = (values[name] & xp.uint32(field.maximum)) << xp.uint32(field.shift)
        words[field.word] = part if words[field.word] is None else words[field.word] | part
    return xp.stack(words, axis=-1)


@with_field_docs
class MessageLayout(NamedTuple):
    """The start of each slot's values, in words from the start of the message.

    Attributes:
      token_ids, token_ranks, logprobs, topk_ids: where those of each slot begin, [B].
      num_words: [] of the message up to here: all of it, where no slot has kept sets.
    """

    token_ids: _Array
    token_ranks: _Array
    logprobs: _Array
    topk_ids: _Array
    num_words: _Array


def num_values(values: _Array) -> _Array:
    """Returns how many bits of `RowValue` are set, of an integer or an array of them."""
    return sum(values >> value & 1 for value in RowValue)


def place_of_value(values: _Array, value: RowValue) -> _Array:
    """Returns the place of a value among those of a row whose slot has the bits `values`."""
    return num_values(values & ((1 << value) - 1))


def layout(
    xp: Any, num_tokens: _Array, num_rows: _Array, columns: _Array, num_more: _Array
) -> MessageLayout:
    """Returns the payload's layout, from four integer arrays [B] of one dtype; see `sections`."""
    starts, sizes = sections(xp, num_tokens, num_rows, columns, num_more)
    ends = xp.cumsum(sizes, dtype=sizes.dtype) + (HEADER_WORDS + SLOT_WORDS * num_tokens.shape[0])
    return MessageLayout(*(starts + (ends - sizes)[:, None]), ends[-1])  # type: ignore[call-arg]


def sections(
    xp: Any, num_tokens: _Array, num_rows: _Array, columns: _Array, num_more: _Array
) -> tuple[_Array, _Array]:
    """Returns the four sections after the slots, which `MessageLayout` names, in words.

    Args:
      num_tokens, num_rows, columns, num_more: integer arrays [B] of one dtype. int64 holds the
        sums of any field values, as a reader of untrusted bytes needs. int32, the integer of
        traced code, is enough for checked values. `num_more` counts what a row has behind its
        columns: chosen ids, and values of the row.

    Returns:
      [4, B] the start of each slot's values within each section, and [4] the sections' sizes.
    """
    rows = num_rows * (columns > 0).astype(columns.dtype)
    sizes = xp.array([num_tokens, num_rows, rows * (columns + num_more), rows * (columns - 1)])
    ends = xp.cumsum(sizes, axis=1, dtype=sizes.dtype)
    return ends - sizes, sizes.sum(axis=1, dtype=sizes.dtype)


def kept_rows(xp: Any, state: _Array, num_tokens: _Array, kept: _Array) -> _Array:
    """Returns the kept rows of each slot: its emitted tokens, where it asked for kept sets.

    Args:
      state, num_tokens, kept: integer arrays [B], fields of the slots.

    Returns:
      [B] of the dtype of `num_tokens`. A prefill's first token is one row: drafts follow it.
    """
    first = state == SlotState.PREFILL_FIRST_TOKEN
    return xp.where(first, xp.minimum(num_tokens, 1), num_tokens) * kept


def words_bound(
    num_tokens: Sequence[int],
    columns: Sequence[int],
    num_more: Sequence[int],
    kept: Sequence[int | None] | None = None,
) -> int:
    """Returns the most words that slots with these counts [B] can fill.

    Args:
      num_tokens: the most tokens that each slot can emit, its drafts plus one.
      columns: columns of each slot, 0 without logprobs.
      num_more: chosen token ids and values of a row of each slot.
      kept: the most kept ids of a token of each slot; None for a slot without kept sets, or for
        all slots.
    """
    words = HEADER_WORDS
    most = [None] * len(num_tokens) if kept is None else kept
    for tokens, cols, more, ids in zip(num_tokens, columns, num_more, most, strict=True):
        rows = tokens if cols > 0 else 0
        words += SLOT_WORDS + tokens + rows * (2 * cols + more)
        if ids is not None:
            words += tokens * (2 + ids)
    return words


@with_field_docs
class Limits(NamedTuple):
    """The most that a row of a message has, by what requests may ask for.

    Attributes:
      columns: of an emitted token's logprobs, 0 without.
      more: its chosen ids and values.
      kept: its kept ids; None without kept sets.
      prompt_columns, prompt_chosen: of a row of a prompt; 0 without.
    """

    columns: int
    more: int
    kept: int | None
    prompt_columns: int
    prompt_chosen: int


def message_bound(num_slots: int, positions: int, prompt_tokens: int, limits: Limits) -> int:
    """Returns the words of a worker's longest message, whatever its requests ask for.

    A step's is whole. A chunk of a prompt has `PROMPT_WORDS` at most, or a step's: with a large K
    it has fewer tokens.

    Args:
      num_slots: of the worker.
      positions: tokens that a step can emit in each slot.
      prompt_tokens: the most that one chunk can have.
      limits: of the rows.
    """
    step = words_bound(
        [positions] * num_slots,
        [limits.columns] * num_slots,
        [limits.more] * num_slots,
        [limits.kept] * num_slots,
    )
    others = [0] * (num_slots - 1)
    chunk = words_bound(
        [prompt_tokens, *others],
        [limits.prompt_columns, *others],
        [limits.prompt_chosen, *others],
    )
    return max(step, min(chunk, PROMPT_WORDS) if limits.prompt_columns else 0)


def failed_checks(error_checks: int) -> list[str]:
    """Returns the names of the device checks whose bits are set."""
    names = [check.name for check in DeviceCheck if error_checks >> check & 1]
    return names or ["unnamed check"]
