"""Packing on the device: one step's results into one array of words, ready for one copy.

The layout is `ipc.wire`'s; this module only computes, for every value, the word that it goes to.
Shapes are static: the array has the size of a bucket that the host chose from what it knew when it
launched the step, and the header says how many of its words are the message.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ipc import wire
from ipc.wire import DeviceCheck, Kind, SlotState
from jax_specdec.wording import counted
from pallas_kernels import TopkLogprobs


class SlotFields(NamedTuple):
    """What every slot says of itself. Axes: B slots."""

    state: jax.Array  # [B] int32 SlotState
    mode: jax.Array  # [B] int32 LogprobsMode
    columns: jax.Array  # [B] int32: 0 no logprobs, K + 1 otherwise
    num_tokens: jax.Array  # [B] int32
    num_rows: jax.Array  # [B] int32: the leading tokens that have logprobs
    num_drafts: jax.Array  # [B] int32: proposed for this step
    num_chosen: jax.Array  # [B] int32: chosen token ids a row
    generation: jax.Array  # [B] uint32


class Rows(NamedTuple):
    """The tokens that have logprobs, slot after slot. R = B * S, of which `num` exist."""

    flat: jax.Array  # [R] int32: slot * S + position; out of bounds from `num` on
    num: jax.Array  # [] int32


def select_rows(num_rows: jax.Array, num_positions: int) -> Rows:
    """The first `num_rows[b]` positions of each slot b, compacted in message order.

    Args:
      num_rows: [B] int32.
      num_positions: S.
    """
    total = num_rows.shape[0] * num_positions
    wanted = (jnp.arange(num_positions, dtype=jnp.int32)[None, :] < num_rows[:, None]).reshape(-1)
    target = jnp.where(wanted, jnp.cumsum(wanted, dtype=jnp.int32) - 1, total)
    index = jnp.arange(total, dtype=jnp.int32)
    flat = jnp.full(total, total, jnp.int32).at[target].set(index, mode="drop")
    return Rows(flat, wanted.sum(dtype=jnp.int32))


def pack(
    slots: SlotFields,
    token_ids: jax.Array,
    rows: Rows,
    logprobs: TopkLogprobs,
    *,
    kind: int,
    step: jax.Array,
    running: jax.Array,
    draft_follows: jax.Array | bool,
    process_rank: int | jax.Array,
    vocab_size: int,
    num_words: int,
) -> jax.Array:
    """Pack one message.

    Args:
      slots: the slots' fields; counts are checked here against S and the columns against K.
      token_ids: [B, S] int32; slot b's first `num_tokens[b]` are sent.
      rows: which (slot, position) each row of `logprobs` is, from `select_rows`.
      logprobs: of the rows, R = B * S; column 0 is the sent token.
      kind: message kind; K comes from the shape of `logprobs`.
      step: [2] uint32: low and high half of the step number.
      running: [] bool, whether any sequence goes on after this step.
      draft_follows: whether this step's draft message follows.
      process_rank: which process rank sends; an array is uint32 [].
      vocab_size: V; sent ids must be below it.
      num_words: static size of the array; the longest message that may come of these shapes.

    Returns:
      [num_words] uint32, of which the header's `num_words` are the message and the rest are 0. A
      failed check (`DeviceCheck`) sets the header's error bit: the host must not send it.

    Raises:
      WireError: `kind` or K does not fit the word that they share, S or the process rank does not
        fit its field, or the bucket is smaller than the header and the slots.
    """
    batch, num_positions = token_ids.shape
    k = logprobs.token_ids.shape[1] - 1
    wire.fits("kind", kind, wire.HEADER["kind"])
    wire.fits("max_num_logprobs", k, wire.HEADER["max_num_logprobs"])
    fixed_words = wire.HEADER_WORDS + wire.SLOT_WORDS * batch
    if num_words < fixed_words:
        raise wire.WireError(
            f"a bucket of {counted(num_words, 'word')} cannot hold the header and "
            f"{counted(batch, 'slot')}: {fixed_words} words"
        )
    num_extra = logprobs.extra_logprobs.shape[1]
    wire.fits("num_positions", num_positions, wire.SLOT["num_tokens"])
    if isinstance(process_rank, int):
        wire.fits("process_rank", process_rank, wire.HEADER["process_rank"])
    checks = _checks(slots, token_ids, k, num_extra, kind, vocab_size)
    # Wrong counts set the error bit; clipped, they cannot make a value land on the header.
    tokens = jnp.clip(slots.num_tokens, 0, num_positions)
    num_rows = jnp.clip(slots.num_rows, 0, tokens)
    columns = jnp.clip(slots.columns, 0, k + 1)
    chosen = jnp.clip(slots.num_chosen, 0, num_extra)
    largest_k = jnp.maximum(jnp.max(columns, initial=0) - 1, 0)
    layout = wire.layout(jnp, tokens, num_rows, columns, chosen)
    checks |= (layout.num_words > num_words).astype(jnp.uint32) << DeviceCheck.WORDS

    # Where each row's values go: its slot's start, plus its place among the slot's rows.
    slot_of_row = jnp.minimum(rows.flat // num_positions, batch - 1)
    row_in_slot = rows.flat % num_positions
    is_row = jnp.arange(rows.flat.shape[0], dtype=jnp.int32) < rows.num
    columns, chosen = columns[slot_of_row], chosen[slot_of_row]

    def of_rows(
        start: jax.Array, stride: jax.Array | int, first: jax.Array, count: jax.Array, size: int
    ) -> jax.Array:
        """The words [R, size] of values whose first `count` [R] exist; the others go nowhere."""
        column = jnp.arange(size, dtype=jnp.int32)[None, :]
        begin = start[slot_of_row] + row_in_slot * stride + first
        exists = is_row[:, None] & (column < count[:, None])
        return jnp.where(exists, begin[:, None] + column, num_words)

    zero, one = jnp.zeros_like(columns), jnp.ones_like(columns)
    width = columns + chosen
    in_slot = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
    sent = in_slot < tokens[:, None]
    parts = [
        (jnp.where(sent, layout.token_ids[:, None] + in_slot, num_words), token_ids),
        (of_rows(layout.token_ranks, 1, zero, one, 1), logprobs.token_ranks),
        (of_rows(layout.logprobs, width, zero, columns, k + 1), logprobs.logprobs),
        (of_rows(layout.logprobs, width, columns, chosen, num_extra), logprobs.extra_logprobs),
        (of_rows(layout.topk_ids, columns - 1, zero, columns - 1, k), logprobs.token_ids[:, 1:]),
    ]
    header = {
        "version": wire.VERSION,
        "magic": wire.MAGIC,
        "kind": kind,
        "max_num_logprobs": largest_k,
        "running": running,
        "draft_follows": draft_follows,
        "error": checks != 0,
        "error_checks": checks,
        "num_slots": batch,
        "num_words": layout.num_words,
        "step_low": step[0],
        "step_high": step[1],
        "process_rank": process_rank,
    }
    fixed = [
        wire.words_of(jnp, wire.HEADER, wire.HEADER_WORDS, _unsigned(header)),
        wire.words_of(jnp, wire.SLOT, wire.SLOT_WORDS, _unsigned(slots._asdict())).reshape(-1),
    ]
    words = jnp.zeros(num_words, jnp.uint32).at[:fixed_words].set(jnp.concatenate(fixed))
    # One scatter, not five: on an accelerator each would be a launch of its own.
    return words.at[jnp.concatenate([target.reshape(-1) for target, _ in parts])].set(
        jnp.concatenate([_bits(values.reshape(-1)) for _, values in parts]), mode="drop"
    )


def _checks(
    slots: SlotFields, token_ids: jax.Array, k: int, num_extra: int, kind: int, vocab_size: int
) -> jax.Array:
    """The header's `error_checks`: a bit for each `DeviceCheck` that failed. [] uint32"""
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
        | _outside(slots.columns, 0, most("columns", k + 1))
        | _outside(slots.num_chosen, 0, most("num_chosen", num_extra)),
    }
    bits = [jnp.any(wrong).astype(jnp.uint32) << check for check, wrong in failed.items()]
    return jnp.stack(bits).sum(dtype=jnp.uint32)


def _outside(values: jax.Array, low: int, high: jax.Array | int) -> jax.Array:
    return (values < low) | (values > high)


def _unsigned(values: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.uint32) for name, value in values.items()}


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint32)


def bucket(num_words: int) -> int:
    """The smallest bucket of at least `num_words` words: a power of two, or one and a half of one.

    Few enough that batches of changing size soon stop compiling, and never more than half again
    what was needed.
    """
    power = 1 << max(num_words - 1, 1).bit_length()
    return power * 3 // 4 if num_words <= power * 3 // 4 else power


K_BUCKETS = (0, 5, 20, 64, 128)


def k_bucket(k: int, vocab_size: int) -> int:
    """The smallest static K of at least `k`, at most the vocabulary."""
    for size in K_BUCKETS:
        if k <= size:
            return min(size, vocab_size)
    raise wire.WireError(f"K = {k} is over the limit {wire.MAX_TOP_K}")
