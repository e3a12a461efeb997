"""Packing on the device: one step's results into one array of words, ready for one copy.

The layout is `ipc.wire`'s; this module only computes, for every value, the word that it goes to.
Shapes are static: the array has the size of a bucket that the host chose from what it knew when it
launched the step, and the header says how many of its words are the message.

Axes: B slots, S positions, R = B * S rows, K1 = K + 1 columns, C chosen ids, V vocabulary, W words,
M ids of a kept set at most.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer, Shaped, UInt32

from ipc import wire
from ipc.field_docs import with_field_docs
from ipc.wire import KEPT_MANY, DeviceCheck, Kind, RowValue, SlotState
from jax_specdec.device.messages.arguments import check_array, check_size
from jax_specdec.kept_sets import PaddedKept
from jax_specdec.requests import ROW_VALUES
from jax_specdec.wording import pluralize
from pallas_kernels import TopkLogprobs


class PackedSlots(NamedTuple):
    """The values of every slot's fields in a message; `ipc.wire.SLOT` has their places."""

    state: Int32[Array, " B"]  # SlotState
    mode: Int32[Array, " B"]  # LogprobsMode
    kept: Int32[Array, " B"]  # 1 where the emitted tokens have kept sets, else 0
    columns: Int32[Array, " B"]  # 0 for no logprobs, K + 1 otherwise
    num_tokens: Int32[Array, " B"]
    num_rows: Int32[Array, " B"]  # the leading tokens that have logprobs
    num_drafts: Int32[Array, " B"]  # proposed for this step
    values: Int32[Array, " B"]  # bits of `RowValue`: values of each row
    num_chosen: Int32[Array, " B"]  # chosen token ids a row
    generation: UInt32[Array, " B"]


@with_field_docs
class Stamp(NamedTuple):
    """The fields of a message's header beside its sizes.

    Attributes:
      step: the number, low and high half.
      process_rank: which one sends.
      weights_version: of the weights that made the rows.
      digest: of what the rows' bits depend on (`model.digest_of`).
    """

    step: UInt32[Array | np.ndarray, "2"]
    process_rank: Integer[Array, ""] | int = 0
    weights_version: Integer[Array, ""] | int = 0
    digest: Integer[Array, ""] | int = 0


@with_field_docs
class SentRows(NamedTuple):
    """The tokens that have logprobs, slot after slot: the first `num` of R rows.

    Attributes:
      flat: slot * S + position; out of bounds from `num` on.
      num: how many there are.
    """

    flat: Int32[Array, " R"]
    num: Int32[Array, ""]


class KeptRows(NamedTuple):
    """The kept sets of a step's emitted tokens, slot after slot: the first `num` of R."""

    num: Int32[Array, ""]
    sets: PaddedKept  # [R]


class _Counts(NamedTuple):
    """Counts of each slot, and which values its rows have."""

    tokens: Int32[Array, " B"]
    rows: Int32[Array, " B"]
    columns: Int32[Array, " B"]
    chosen: Int32[Array, " B"]
    values: Int32[Array, " B"]  # bits

    @property
    def of_layout(self) -> tuple[jax.Array, ...]:
        """The counts [B] that `wire.layout` takes."""
        return self.tokens, self.rows, self.columns, self.chosen + wire.num_values(self.values)


def select_rows(num_rows: jax.Array, num_positions: int) -> SentRows:
    """The first `num_rows[b]` positions of each slot b, compacted in message order.

    Args:
      num_rows: rows of each slot.
      num_positions: S.
    """
    check_array("num_rows", num_rows, "integers", ("B",), "the rows of each slot [B]")
    check_size("num_positions", num_positions, "S")
    total = num_rows.shape[0] * num_positions
    is_row = (jnp.arange(num_positions, dtype=jnp.int32)[None, :] < num_rows[:, None]).reshape(-1)
    target = jnp.where(is_row, jnp.cumsum(is_row, dtype=jnp.int32) - 1, total)
    index = jnp.arange(total, dtype=jnp.int32)
    flat = jnp.full(total, total, jnp.int32).at[target].set(index, mode="drop")
    return SentRows(flat, is_row.sum(dtype=jnp.int32))


def pack(
    slots: PackedSlots,
    token_ids: Int32[Array, "B S"],
    rows: SentRows,
    logprobs: TopkLogprobs,
    stamp: Stamp | UInt32[Array, "2"],
    *,
    kind: int,
    running: Bool[Array, ""] | bool,
    draft_follows: Bool[Array, ""] | bool,
    vocab_size: int,
    num_words: int,
    kept: KeptRows | None = None,
) -> UInt32[Array, " W"]:
    """Pack one message.

    Args:
      slots: the slots' fields; counts are checked here against S and the columns against K.
      token_ids: slot b's first `num_tokens[b]` are sent.
      rows: which (slot, position) each row of `logprobs` is, from `select_rows`.
      logprobs: of the rows; column 0 is the sent token. Its values of a row are those that the
        slots may ask for.
      stamp: of the header, or a step number alone.
      kind: message kind; K comes from the shape of `logprobs`.
      running: whether any sequence goes on after this step.
      draft_follows: whether this step's draft message follows.
      vocab_size: V; sent ids must be below it.
      num_words: W, static; the longest message that these shapes can make.
      kept: the kept sets of the rows that `wire.kept_rows` counts; None where no slot asks.

    Returns:
      The words, of which the header's `num_words` are the message and the rest are 0. A failed
      check (`DeviceCheck`) sets the header's error bit: the host must not send it.

    Raises:
      WireError: `kind` or K does not fit the word that they share, S or the process rank does not
        fit its field, or the bucket is smaller than the header and the slots.
    """
    batch, num_positions = token_ids.shape
    k, num_extra = logprobs.token_ids.shape[1] - 1, logprobs.extra_logprobs.shape[1]
    stamp = stamp if isinstance(stamp, Stamp) else Stamp(stamp)
    _refuse_unfit(kind, k, num_positions, stamp.process_rank, num_words, batch)
    available = sum(1 << value for value in values_of(logprobs))
    checks = _checks(slots, token_ids, k, num_extra, available, kind, vocab_size, kept)
    counts = _within(slots, num_positions, k, num_extra, available)
    largest_k = jnp.maximum(jnp.max(counts.columns, initial=0) - 1, 0)
    layout = wire.layout(jnp, *counts.of_layout)
    values = _payload(layout, counts, token_ids, rows, logprobs, nowhere=num_words)
    if kept is not None:
        more, end = _kept_payload(layout.num_words, kept, nowhere=num_words)
        layout = layout._replace(num_words=end)
        values += more
    checks |= (layout.num_words > num_words).astype(jnp.uint32) << DeviceCheck.WORDS
    header = {
        "version": wire.VERSION,
        "magic": wire.MAGIC,
        "kind": kind,
        "max_num_logprobs": largest_k,
        "running": running,
        "draft_follows": draft_follows,
        "error": checks != 0,
        "error_checks": checks,
        "digest": stamp.digest,
        "num_slots": batch,
        "num_words": layout.num_words,
        "step_low": stamp.step[0],
        "step_high": stamp.step[1],
        "process_rank": stamp.process_rank,
        "weights_version": stamp.weights_version,
    }
    fixed = jnp.concatenate([
        wire.words_of(jnp, wire.HEADER, wire.HEADER_WORDS, _unsigned(header)),
        wire.words_of(jnp, wire.SLOT, wire.SLOT_WORDS, _unsigned(slots._asdict())).reshape(-1),
    ])  # fmt: skip
    words = jnp.zeros(num_words, jnp.uint32).at[: fixed.size].set(fixed)
    # One scatter, not five: on an accelerator each would be a launch of its own.
    return words.at[jnp.concatenate([target.reshape(-1) for target, _ in values])].set(
        jnp.concatenate([_bits(value.reshape(-1)) for _, value in values]), mode="drop"
    )


def values_of(logprobs: TopkLogprobs) -> dict[RowValue, Shaped[Array, " R"]]:
    """The values of rows that there are, each [R]."""
    named = {value: getattr(logprobs, name) for name, value in ROW_VALUES.items()}
    if (words := logprobs.digests) is not None:
        named |= {RowValue.DIGEST_LOW: words[:, 0], RowValue.DIGEST_HIGH: words[:, 1]}
    return {value: values for value, values in named.items() if values is not None}


def _refuse_unfit(
    kind: int,
    k: int,
    num_positions: int,
    process_rank: jax.Array | int,
    num_words: int,
    batch: int,
) -> None:
    """Refuse, while tracing, static values that no message has room for."""
    wire.fits("kind", kind, wire.HEADER["kind"])
    wire.fits("max_num_logprobs", k, wire.HEADER["max_num_logprobs"])
    wire.fits("num_positions", num_positions, wire.SLOT["num_tokens"])
    if isinstance(process_rank, int):
        wire.fits("process_rank", process_rank, wire.HEADER["process_rank"])
    fixed_words = wire.HEADER_WORDS + wire.SLOT_WORDS * batch
    if num_words < fixed_words:
        raise wire.WireError(
            f"a bucket of {pluralize(num_words, 'word')} cannot hold the header and "
            f"{pluralize(batch, 'slot')}: {fixed_words} words"
        )


def _checks(
    slots: PackedSlots,
    token_ids: Int32[Array, "B S"],
    k: int,
    num_extra: int,
    available: int,
    kind: int,
    vocab_size: int,
    kept: KeptRows | None,
) -> UInt32[Array, ""]:
    """The header's `error_checks`: a bit for each `DeviceCheck` that failed."""
    num_positions = token_ids.shape[1]
    most_drafts = num_positions if kind == Kind.DRAFT else num_positions - 1
    sent = jnp.arange(num_positions, dtype=jnp.int32)[None, :] < slots.num_tokens[:, None]

    def most(name: str, count: int) -> int:
        # What the shapes allow may still be wider than the field: K = 65535 has 65536 columns.
        return min(count, wire.SLOT[name].maximum)

    failed = {
        DeviceCheck.SLOT_COUNTS: _outside(slots.num_tokens, 0, most("num_tokens", num_positions))
        | _outside(slots.num_rows, 0, slots.num_tokens)
        | _outside(slots.num_drafts, 0, most("num_drafts", most_drafts))
        | ((slots.num_rows > 0) & (slots.columns == 0)),
        DeviceCheck.TOKEN_ID: sent & _outside(token_ids, 0, vocab_size - 1),
        DeviceCheck.SLOT_FIELDS: _outside(slots.state, 0, max(SlotState))
        | _outside(slots.mode, 0, max(wire.LogprobsMode))
        | _outside(slots.kept, 0, 0 if kept is None else 1)
        | _outside(slots.columns, 0, most("columns", k + 1))
        | _outside(slots.num_chosen, 0, most("num_chosen", num_extra))
        | (slots.values & ~available != 0),
    }
    if kept is not None:
        due = wire.kept_rows(jnp, slots.state, slots.num_tokens, slots.kept)
        failed[DeviceCheck.SLOT_COUNTS] |= _wrong_counts(kept, due.sum(dtype=jnp.int32))
        failed[DeviceCheck.TOKEN_ID] |= _wrong_ids(kept, vocab_size)
    bits = [jnp.any(wrong).astype(jnp.uint32) << check for check, wrong in failed.items()]
    return jnp.stack(bits).sum(dtype=jnp.uint32)


def _within(
    slots: PackedSlots, num_positions: int, k: int, num_extra: int, available: int
) -> _Counts:
    """The slots' counts, clipped to the shapes.

    Wrong counts have set the error bit; clipped, they cannot make a value land on the header.
    """
    tokens = jnp.clip(slots.num_tokens, 0, num_positions)
    return _Counts(
        tokens=tokens,
        rows=jnp.clip(slots.num_rows, 0, tokens),
        columns=jnp.clip(slots.columns, 0, k + 1),
        chosen=jnp.clip(slots.num_chosen, 0, num_extra),
        values=slots.values & available,
    )


def _payload(
    layout: wire.MessageLayout,
    counts: _Counts,
    token_ids: Int32[Array, "B S"],
    rows: SentRows,
    logprobs: TopkLogprobs,
    nowhere: int,
) -> list[tuple[Int32[Array, "..."], Shaped[Array, "..."]]]:
    """The payload's values, each with the word that it goes to.

    Args:
      nowhere: the word of values that are not sent; out of bounds.

    Returns:
      Pairs of words and values, of equal shapes.
    """
    batch, num_positions = token_ids.shape
    k, num_extra = logprobs.token_ids.shape[1] - 1, logprobs.extra_logprobs.shape[1]
    # A row's values begin at its slot's start, plus the row's place among the slot's rows.
    slot_of_row = jnp.minimum(rows.flat // num_positions, batch - 1)
    row_in_slot = rows.flat % num_positions
    is_row = jnp.arange(rows.flat.shape[0], dtype=jnp.int32) < rows.num
    columns, chosen = counts.columns[slot_of_row], counts.chosen[slot_of_row]

    def of_rows(
        start: jax.Array, stride: jax.Array | int, first: jax.Array, count: jax.Array, size: int
    ) -> jax.Array:
        """The words [R, size] of values whose first `count` [R] exist; the others go nowhere."""
        column = jnp.arange(size, dtype=jnp.int32)[None, :]
        begin = start[slot_of_row] + row_in_slot * stride + first
        exists = is_row[:, None] & (column < count[:, None])
        return jnp.where(exists, begin[:, None] + column, nowhere)

    zero, ones = jnp.zeros_like(columns), jnp.ones_like(columns)
    bits = counts.values[slot_of_row]
    width = columns + chosen + wire.num_values(bits)
    more = [
        (
            of_rows(
                layout.logprobs,
                width,
                columns + chosen + wire.place_of_value(bits, value),
                bits >> value & 1,
                1,
            ),
            values,
        )
        for value, values in values_of(logprobs).items()
    ]
    in_slot = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
    sent = in_slot < counts.tokens[:, None]
    return [
        (jnp.where(sent, layout.token_ids[:, None] + in_slot, nowhere), token_ids),
        (of_rows(layout.token_ranks, 1, zero, ones, 1), logprobs.token_ranks),
        (of_rows(layout.logprobs, width, zero, columns, k + 1), logprobs.logprobs),
        (of_rows(layout.logprobs, width, columns, chosen, num_extra), logprobs.extra_logprobs),
        (of_rows(layout.topk_ids, columns - 1, zero, columns - 1, k), logprobs.token_ids[:, 1:]),
        *more,
    ]


def _outside(values: jax.Array, low: int, high: jax.Array | int) -> jax.Array:
    return (values < low) | (values > high)


def _unsigned(values: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.uint32) for name, value in values.items()}


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint32)


def _kept_payload(
    start: Int32[Array, ""], kept: KeptRows, nowhere: int
) -> tuple[list[tuple[Int32[Array, "..."], Shaped[Array, "..."]]], Int32[Array, ""]]:
    """The values of the sets, each with the word that it goes to, and the words of the message.

    Args:
      start: where the message's other values end.
      nowhere: the word of values that are not sent; out of bounds.
    """
    row, is_row = _rows(kept)
    sizes = _sizes(kept)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    ids_start = start + 2 * kept.num
    places = (ids_start + ends - sizes)[:, None] + _column(kept)
    values = [
        (jnp.where(is_row, start + row, nowhere), kept.sets.counts),
        (jnp.where(is_row, start + kept.num + row, nowhere), kept.sets.log_kept),
        (jnp.where(_is_sent(kept), places, nowhere), kept.sets.token_ids),
    ]
    return values, ids_start + ends[-1]


def _wrong_counts(kept: KeptRows, num_expected: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether there are other rows than expected, or a count that no reader would take."""
    _, is_row = _rows(kept)
    counts, most = kept.sets.counts, kept.sets.token_ids.shape[1]
    wrong = (counts == 0) | (counts < KEPT_MANY) | (counts > most)
    return jnp.any(is_row & wrong) | (kept.num != num_expected)


def _wrong_ids(kept: KeptRows, vocab_size: int) -> Bool[Array, ""]:
    """Whether an id that is sent is outside the vocabulary."""
    ids = kept.sets.token_ids
    return jnp.any(_is_sent(kept) & ((ids < 0) | (ids >= vocab_size)))


def _rows(kept: KeptRows) -> tuple[Int32[Array, " R"], Bool[Array, " R"]]:
    row = jnp.arange(kept.sets.counts.shape[0], dtype=jnp.int32)
    return row, row < kept.num


def _column(kept: KeptRows) -> Int32[Array, "1 M"]:
    return jnp.arange(kept.sets.token_ids.shape[1], dtype=jnp.int32)[None, :]


def _sizes(kept: KeptRows) -> Int32[Array, " R"]:
    """The ids of each row that are sent; a wrong count sends no more than there are."""
    sizes: jax.Array = jnp.clip(kept.sets.counts, 0, kept.sets.token_ids.shape[1])
    return jnp.where(_rows(kept)[1], sizes, 0)


def _is_sent(kept: KeptRows) -> Bool[Array, "R M"]:
    return _column(kept) < _sizes(kept)[:, None]
