"""Bytes to a validated `Message`: column views of one buffer, no object per token.

The bytes are not trusted: every count is checked against its limit, and the length that the counts
imply against the actual length, before any value is used as an index.
"""

import functools
import operator
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc import wire
from ipc.wire import Kind, SlotState
from jax_specdec.kept_sets import KeptSets, offsets_of
from jax_specdec.records.slot_fields import MessageError as MessageError
from jax_specdec.records.slot_fields import SlotFields, Starts, read_slots, starts_of_alike
from jax_specdec.wording import pluralize

_KINDS = {int(kind): kind for kind in Kind}
_HEADER = struct.Struct(f"<{wire.HEADER_WORDS}I")

# The words that differ from step to step; they are one field each.
_NUM_WORDS, _STEP_LOW, _STEP_HIGH = (
    wire.HEADER[name].word for name in ("num_words", "step_low", "step_high")
)
_LASTING_WORDS = [
    word for word in range(wire.HEADER_WORDS) if word not in (_NUM_WORDS, _STEP_LOW, _STEP_HIGH)
]
_lasting_words_of = operator.itemgetter(*_LASTING_WORDS)
_LASTING_FIELDS = {
    name: (_LASTING_WORDS.index(f.word), f.shift, f.maximum)
    for name, f in wire.HEADER.items()
    if f.word in _LASTING_WORDS
}
# The bits without a meaning, of the words that have some.
UNUSED_BITS = tuple(
    (word, unused)
    for word in range(wire.HEADER_WORDS)
    if (unused := 2**32 - 1 - sum(
        f.maximum << f.shift for f in wire.HEADER.values() if f.word == word
    ))
)  # fmt: skip

_NO_KEPT = KeptSets.none()


# Not frozen, as little else is that is made once a step: it would take four times as long to make.
@dataclass(slots=True, eq=False)
class Message:
    """One decoded message, which nobody changes.

    Arrays are read-only views; axes: B slots, T tokens, R rows.

    `*_start` [B] are offsets of each slot's values in the payload array beside them; slot b's
    logprobs are `logprobs[s : s + num_rows[b] * width[b]]` with `width = columns + num_more`,
    its top-K ids `topk_ids[s : s + num_rows[b] * (columns[b] - 1)]`.
    """

    kind: Kind
    max_num_logprobs: int
    running: bool
    draft_follows: bool
    step: int
    process_rank: int
    weights_version: int  # of the weights that made the rows
    state: NDArray[np.int64]  # [B] SlotState
    mode: NDArray[np.int64]  # [B] LogprobsMode
    kept: NDArray[np.int64]  # [B] 1 where emitted tokens have kept sets, else 0
    columns: NDArray[np.int64]  # [B] 0: no logprobs, K + 1 otherwise
    num_tokens: NDArray[np.int64]  # [B]
    num_rows: NDArray[np.int64]  # [B] tokens that have logprobs
    num_drafts: NDArray[np.int64]  # [B]
    values: NDArray[np.int64]  # [B] bits of `RowValue`: what rows have behind their logprobs
    num_chosen: NDArray[np.int64]  # [B]
    num_more: NDArray[np.int64]  # [B] chosen ids and values of a row
    generation: NDArray[np.int64]  # [B]
    token_ids: NDArray[np.int32]  # [T]
    token_ranks: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32]  # [sum of rows * width]
    topk_ids: NDArray[np.int32]  # [sum of rows * (columns - 1)]
    kept_sets: KeptSets  # of all emitted tokens that have them, slot after slot
    kept_start: NDArray[np.int64]  # [B] the slot's first one; 0 in a message without any
    num_bytes: int
    most_drafts: int  # the largest of `num_drafts`; 0 without slots
    digest: int  # of what the rows' bits depend on; 0 where they depend on the batch
    # `columns` and `mode` of every slot, where all emit, in one mode, and none has more.
    same_columns: int | None
    same_mode: int | None
    made_starts: Starts | None  # `starts`, once they were read

    @property
    def num_slots(self) -> int:
        return len(self.state)

    @property
    def starts(self) -> Starts:
        """The four `*_start`; who reads all of a usual step's records needs none of them."""
        if self.made_starts is None:
            assert self.same_columns is not None
            self.made_starts = starts_of_alike(self.num_tokens, self.same_columns)
        return self.made_starts

    @property
    def token_start(self) -> NDArray[np.int64]:
        return self.starts[0]

    @property
    def row_start(self) -> NDArray[np.int64]:
        return self.starts[1]

    @property
    def logprob_start(self) -> NDArray[np.int64]:
        return self.starts[2]

    @property
    def topk_start(self) -> NDArray[np.int64]:
        return self.starts[3]

    @property
    def row_columns(self) -> int | None:
        """The columns of each row, where all rows have as many and nothing more; 0 without rows.

        None where they differ.
        """
        if self.same_columns is not None:
            return self.same_columns
        columns = self.columns[self.num_rows > 0]
        if not columns.size:
            return 0
        alike = not (columns != columns[0]).any() and not self.num_more.any()
        return int(columns[0]) if alike else None

    def slot(self, index: int) -> "SlotView":
        """Slot `index`'s values with their shapes; convenient, and too slow for the hot path."""
        tokens, rows = int(self.num_tokens[index]), int(self.num_rows[index])
        columns, chosen = int(self.columns[index]), int(self.num_chosen[index])
        more = int(self.num_more[index])
        at, row = int(self.token_start[index]), int(self.row_start[index])
        lp, top = int(self.logprob_start[index]), int(self.topk_start[index])
        width, k = (columns + more, columns - 1) if columns else (0, 0)
        rows_of_slot = self.logprobs[lp : lp + rows * width].reshape(rows, width)
        kept = int(wire.kept_rows(np, self.state[index], self.num_tokens[index], 1))
        return SlotView(
            state=SlotState(int(self.state[index])),
            generation=int(self.generation[index]),
            token_ids=self.token_ids[at : at + tokens],
            token_ranks=self.token_ranks[row : row + rows],
            logprobs=rows_of_slot[:, : columns + chosen],
            row_values=rows_of_slot[:, columns + chosen :],
            topk_ids=self.topk_ids[top : top + rows * k].reshape(rows, k),
            kept=self.kept_of(index, kept) if self.kept[index] else None,
        )

    def kept_of(self, index: int, count: int) -> KeptSets:
        """The kept sets of slot `index`'s first `count` tokens; views."""
        start, sets = int(self.kept_start[index]), self.kept_sets
        offsets = sets.offsets[start : start + count + 1]
        return KeptSets(
            sets.counts[start : start + count],
            sets.log_kept[start : start + count],
            offsets - offsets[0],
            sets.token_ids[int(offsets[0]) : int(offsets[-1])],
        )


@dataclass(frozen=True, slots=True, eq=False)
class SlotView:
    """One slot of a message: n tokens, r rows with logprobs."""

    state: SlotState
    generation: int
    token_ids: NDArray[np.int32]  # [n]
    token_ranks: NDArray[np.int32]  # [r]
    logprobs: NDArray[np.float32]  # [r, columns + chosen]
    row_values: NDArray[np.float32]  # [r, those of `RowValue` that the slot's bits name]
    topk_ids: NDArray[np.int32]  # [r, columns - 1]
    kept: KeptSets | None  # of the emitted tokens; None where the request asked for none


def decode(data: Any) -> Message:
    """Decode `data`, any bytes-like object; the message consists of views of its memory.

    Raises:
      MessageError: the bytes are not exactly one valid message.
    """
    view = memoryview(data)
    if view.nbytes % wire.WORD_BYTES or view.nbytes < wire.HEADER_WORDS * wire.WORD_BYTES:
        raise MessageError(
            f"a message has whole 32-bit words and at least {wire.HEADER_WORDS} of them; "
            f"this has {pluralize(view.nbytes, 'byte')}"
        )
    words: NDArray[np.uint32] = np.frombuffer(view, dtype="<u4")
    words.setflags(write=False)
    header, step = _header(view, words.size)
    kind, most_columns = _KINDS[header.kind], header.max_num_logprobs + 1
    num_slots = header.num_slots
    slots_end = wire.HEADER_WORDS + wire.SLOT_WORDS * num_slots
    if slots_end > words.size:
        raise MessageError(
            f"the header counts {pluralize(num_slots, 'slot')}, {slots_end} words; the message has "
            f"{words.size}"
        )
    slots = words[wire.HEADER_WORDS : slots_end].reshape(num_slots, wire.SLOT_WORDS)
    fields = read_slots(kind, most_columns, slots)
    ranks = slots_end + fields.sizes[0]
    logprobs = ranks + fields.sizes[1]
    topk = logprobs + fields.sizes[2]
    end = topk + fields.sizes[3]
    kept_sets, kept_start = _NO_KEPT, fields.kept
    if fields.same_columns is None and np.count_nonzero(kept_start):
        kept_sets, kept_start = decode_kept(words, end, fields)
    elif end != words.size:
        raise MessageError(f"the slots' counts make {end} words; the message has {words.size}")
    integers, floats = words.view(np.int32), words.view(np.float32)
    return Message(  # by place: by name it takes three times as long
        kind,
        header.max_num_logprobs,
        bool(header.running),
        bool(header.draft_follows),
        step,
        header.process_rank,
        header.weights_version,
        fields.state,
        fields.mode,
        fields.kept,
        fields.columns,
        fields.num_tokens,
        fields.num_rows,
        fields.num_drafts,
        fields.values,
        fields.num_chosen,
        fields.num_more,
        fields.generation,
        integers[slots_end:ranks],
        integers[ranks:logprobs],
        floats[logprobs:topk],
        integers[topk:end],
        kept_sets,
        kept_start,
        view.nbytes,
        fields.most_drafts,
        header.digest,
        fields.same_columns,
        fields.same_mode,
        fields.starts,
    )


class _Header(NamedTuple):
    """The header's fields that last, in the order of `wire.HEADER`."""

    version: int
    magic: int
    kind: int
    max_num_logprobs: int
    running: int
    draft_follows: int
    error: int
    error_checks: int
    digest: int
    num_slots: int
    process_rank: int
    weights_version: int


assert _Header._fields == tuple(_LASTING_FIELDS)


def _header(view: memoryview, num_words: int) -> tuple[_Header, int]:
    """The header and the step."""
    raw = _HEADER.unpack_from(view)
    header = checked_header(_lasting_words_of(raw))
    if raw[_NUM_WORDS] != num_words:
        raise MessageError(
            f"the header counts {raw[_NUM_WORDS]} words; the message has {num_words}"
        )
    return header, raw[_STEP_HIGH] << 32 | raw[_STEP_LOW]


@functools.lru_cache(64)
def checked_header(lasting: tuple[int, ...]) -> _Header:
    """The fields of the header's words that last: those of a ring differ a few times in its life.

    Raises:
      MessageError: a field's value cannot be.
    """
    header = _Header._make(
        [lasting[place] >> shift & most for place, shift, most in _LASTING_FIELDS.values()]
    )
    if header.magic != wire.MAGIC:
        raise MessageError(f"magic {header.magic:#06x} is not {wire.MAGIC:#06x}: no message")
    if header.version != wire.VERSION:
        raise MessageError(
            f"message version {header.version}; this reader knows version {wire.VERSION}: "
            "install the same release on both sides"
        )
    if header.kind not in _KINDS:
        raise MessageError(f"message kind {header.kind} is none of {sorted(_KINDS)}")
    for word, unused in UNUSED_BITS:
        if lasting[_LASTING_WORDS.index(word)] & unused:
            raise MessageError(
                f"header word {word} is {lasting[_LASTING_WORDS.index(word)]:#010x}, with bits "
                f"outside {unused ^ 0xFFFFFFFF:#010x} that this version does not know"
            )
    if header.max_num_logprobs > wire.MAX_TOP_K:
        raise MessageError(
            f"max_num_logprobs {header.max_num_logprobs} is over the limit {wire.MAX_TOP_K}"
        )
    if header.error or header.error_checks:
        raise MessageError(
            "the sender's checks failed and it sent the message nevertheless: "
            + ", ".join(wire.failed_checks(header.error_checks))
        )
    return header


def decode_kept(
    words: NDArray[np.uint32], start: int, slots: SlotFields
) -> tuple[KeptSets, NDArray[np.int64]]:
    """The kept sets of a message that has some; views of its words.

    Args:
      words: [W] the whole message.
      start: the word after its top-K ids.
      slots: the checked fields of its slots.

    Returns:
      The sets of all kept rows, and [B] int64 the place of each slot's first one.

    Raises:
      MessageError: a count that cannot be, another number of words than the counts make, or ids
        that do not ascend from 0.
    """
    rows = wire.kept_rows(np, slots.state, slots.num_tokens, slots.kept)
    ends = rows.cumsum()
    num = int(ends[-1])
    ids_start = start + 2 * num
    if ids_start > words.size:
        raise MessageError(
            f"{pluralize(num, 'kept row')} make {ids_start} words; the message has {words.size}"
        )
    counts = words[start : start + num].view(np.int32)
    wrong = (counts == 0) | (counts > wire.MAX_KEPT) | (counts < wire.KEPT_MANY)
    if wrong.any():
        row = int(wrong.argmax())
        raise MessageError(
            f"kept row {row}: a count of {int(counts[row])} cannot be (1 to {wire.MAX_KEPT}, "
            f"{wire.KEPT_ALL} where nothing was cut, {wire.KEPT_MANY} where more are left)"
        )
    offsets = offsets_of(counts)
    end = ids_start + int(offsets[-1])
    if end != words.size:
        raise MessageError(f"the kept counts make {end} words; the message has {words.size}")
    ids = words[ids_start:].view(np.int32)
    _check_ids(ids, offsets)
    masses = words[start + num : ids_start].view(np.float32)
    offsets.flags.writeable = False
    return KeptSets(counts, masses, offsets, ids), ends - rows


def _check_ids(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
    """Raise MessageError where the ids of a set do not ascend, or one is negative."""
    if not ids.size:
        return
    risen = ids[1:] > ids[:-1]
    inner = offsets[(offsets > 0) & (offsets < ids.size)]
    risen[inner - 1] = True  # the next set begins there
    if risen.all() and int(ids.min()) >= 0:
        return
    negative = ids < 0
    at = int(negative.argmax()) if negative.any() else int(risen.argmin()) + 1
    row = int(offsets.searchsorted(at, side="right")) - 1
    before = f" after {int(ids[at - 1])}" if at > offsets[row] else ""
    raise MessageError(
        f"kept row {row}: token id {int(ids[at])}{before} cannot be: ids ascend from 0"
    )
