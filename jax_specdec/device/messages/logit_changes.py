"""The logits that tokens are chosen from, where requests change the model's own.

In this order: tokens that a grammar excludes, and stop tokens that may not come yet, are forbidden,
biases are added, then the penalties for repetition, frequency and presence are applied. Temperature
and filters come after.
Masks and biases are handed down to the read (`row_changes`). Penalties multiply, and
subtract twice, so no sum of biases has their bits: a batch with penalties has a changed copy.
The penalties are vLLM's: https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html

Axes: B slots, S = D + 1 positions, D drafts, T tokens of a slot, I ids that a request names,
V vocabulary (on this device).
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ipc.field_docs import with_field_docs
from jax_specdec.device.messages.batch_options import changes_bucket
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.requests import SamplingParams
from pallas_kernels import VocabShard


class Penalties(NamedTuple):
    """The slots' penalties; a slot without them has the numbers in brackets."""

    repetition: Float32[Array, " B"]  # [1]
    frequency: Float32[Array, " B"]  # [0]
    presence: Float32[Array, " B"]  # [0]
    output_start: Int32[Array, " B"]  # the position of the request's first emitted token


class GrammarMasks(NamedTuple):
    """Masks of the slots' grammars in one step; slots without one allow everything."""

    allowed: Int32[Array, "B S _"]  # row j's tokens, behind drafts 0..j-1
    num_legal: Int32[Array, " B"]  # leading drafts that may come


class SlotChanges(NamedTuple):
    """Changes by the slots' requests."""

    bias_ids: Int32[Array, "B I"]  # distinct; -1 where there is none
    bias: Float32[Array, "B I"]
    held_ids: Int32[Array, "B H"]  # distinct ids that may not come yet; -1 where there is none
    held_until: Int32[Array, " B"]  # the first position at which they may
    penalties: Penalties | None  # None: no slot has any
    grammar: GrammarMasks | None = None  # None: no slot has one


@with_field_docs
class RowChanges(NamedTuple):
    """The changes of each row [B, S, ...], or flat [N, ...], as `verify` takes them.

    Attributes:
      allowed: bit masks; None where no slot forbids an id.
      bias_token_ids: distinct; -1 where there is none.
      bias: None where the tables have no column.
    """

    allowed: Int32[Array, "*rows _"] | None
    bias_token_ids: Int32[Array, "*rows I"] | None
    bias: Float32[Array, "*rows I"] | None

    def at(self, x: Float32[Array, "R N"], ids: Int32[Array, "R N"]) -> Float32[Array, "R N"]:
        """The changed logits of R rows' tokens, of their own x; the changes are [R, ...]."""
        if self.bias_token_ids is not None and self.bias is not None:
            same = (ids[:, :, None] == self.bias_token_ids[:, None]) & (ids >= 0)[:, :, None]
            added = jnp.where(same, self.bias[:, None], 0.0).sum(axis=2)
            x = jnp.where(same.any(axis=2), x + added, x)
        if self.allowed is None:
            return x
        words = jnp.take_along_axis(self.allowed, jnp.maximum(ids, 0) // 32, axis=1, mode="clip")
        forbidden = (lax.shift_right_logical(words, ids % 32) & 1) == 0
        return jnp.where(forbidden & (ids >= 0), -jnp.inf, x)


class ChangesSize(NamedTuple):
    """The size of what a batch changes; a program is compiled for each."""

    ids: int  # I: columns of the tables of biased and of held-back ids
    penalties: bool  # some slot has any
    holds_back: bool = False  # some slot has ids that may not come yet
    grammar: bool = False  # some slot has one

    def holds(self, other: "ChangesSize") -> bool:
        """Whether tables of this size have room for what is of the other one."""
        return all(size >= its for size, its in zip(self, other, strict=True))


class Written(NamedTuple):
    """The tokens that a step's rows come after."""

    tokens: Int32[Array, "B T"]  # prompt and emitted tokens
    lengths: Int32[Array, " B"]  # how many are known: row 0 decides the token at this position
    draft_ids: Int32[Array, "B D"]  # row j comes after drafts 0..j-1 too


def changes_size(params: Sequence[SamplingParams]) -> ChangesSize | None:
    """The size of what the requests of a batch change; None where none changes anything."""
    if not any(slot_params.changes_logits for slot_params in params):
        return None
    named = (*(slot_params.logit_bias for slot_params in params), *map(_held, params))
    return ChangesSize(
        ids=changes_bucket(max(map(len, named))),
        penalties=any(slot_params.penalizes for slot_params in params),
        holds_back=any(map(_held, params)),
        grammar=any(slot_params.structured is not None for slot_params in params),
    )


def changes_of_requests(
    params: Sequence[SamplingParams],
    size: ChangesSize,
    prompt_lengths: Sequence[int],
    num_emitted: Sequence[int],
) -> SlotChanges:
    """Changes by the requests of a batch, on the device: request b is in slot b.

    Args:
      params: of B requests.
      size: at least their `changes_size`.
      prompt_lengths: [B] tokens that each request was admitted with.
      num_emitted: [B] how many of them, at the end, were emitted for it elsewhere.
    """
    biases, width = [slot_params.logit_bias for slot_params in params], size.ids
    held_width = width if size.holds_back else 0
    lengths = np.array(prompt_lengths, np.int32)
    penalties = None
    if size.penalties:
        penalties = Penalties(
            repetition=_floats(slot_params.repetition_penalty for slot_params in params),
            frequency=_floats(slot_params.frequency_penalty for slot_params in params),
            presence=_floats(slot_params.presence_penalty for slot_params in params),
            output_start=_on_host(lengths - np.array(num_emitted, np.int32)),
        )
    changes = SlotChanges(
        bias_ids=_table(
            [[id for id, _ in slot_params] for slot_params in biases], width, -1, np.int32
        ),
        bias=_table(
            [[bias for _, bias in slot_params] for slot_params in biases], width, 0, np.float32
        ),
        held_ids=_table([_held(slot_params) for slot_params in params], held_width, -1, np.int32),
        held_until=_on_host(
            lengths + np.array([slot_params.min_tokens for slot_params in params], np.int32)
        ),
        penalties=penalties,
    )
    on_device: SlotChanges = jax.device_put(changes)
    return on_device


def _held(params: SamplingParams) -> tuple[int, ...]:
    return tuple(dict.fromkeys(params.stop_token_ids)) if params.min_tokens else ()


def _floats(values: Iterable[float]) -> Any:
    return np.array(list(values), np.float32)


def _table(
    rows: Sequence[Sequence[float]], width: int, missing: int, dtype: type[np.generic]
) -> Any:
    table = np.full((len(rows), width), missing, dtype)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def _on_host(values: np.ndarray) -> Any:
    """A NumPy array, where a carrier says `Array`: all go to the device in one call."""
    return values.astype(np.int32)


def row_changes(
    changes: SlotChanges, lengths: Int32[Array, " B"], num_positions: int, vocab_size: int
) -> RowChanges:
    """Changes of slots without penalties to their S rows' logits.

    Args:
      changes: by slot.
      lengths: the position of the token that row 0 decides.
      num_positions: S.
      vocab_size: V.
    """
    assert changes.penalties is None
    batch, width = changes.bias_ids.shape
    row = jnp.arange(num_positions, dtype=jnp.int32)[None, :, None]
    allowed = None if changes.grammar is None else changes.grammar.allowed
    if changes.held_ids.shape[1]:
        early = lengths[:, None, None] + row < changes.held_until[:, None, None]
        words = -(-vocab_size // 32)
        is_held_token = (
            early & (changes.held_ids >= 0)[:, None] & (changes.held_ids < vocab_size)[:, None]
        )
        place = jnp.where(is_held_token, changes.held_ids[:, None] // 32, words)  # behind: dropped
        # Different bits, each of them set (a slot with a grammar holds none back): a subtraction
        # clears it and carries nothing.
        bits = jnp.int32(1) << jnp.broadcast_to(changes.held_ids[:, None] % 32, place.shape)
        slot = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        mask_words = jnp.full((batch, num_positions, words), -1, jnp.int32)
        mask_words = mask_words if allowed is None else allowed
        allowed = mask_words.at[slot, row, place].add(-bits, mode="drop")
    if not width:
        return RowChanges(allowed, None, None)
    shape = batch, num_positions, width
    return RowChanges(
        allowed,
        jnp.broadcast_to(changes.bias_ids[:, None], shape),
        jnp.broadcast_to(changes.bias[:, None], shape),
    )


def changed_logits(
    logits: Float[Array, "B S V"],
    changes: SlotChanges,
    written: Written,
    parallel: Parallel = ONE_DEVICE,
) -> Float32[Array, "B S V"]:
    """The logits that choose each row's token: a changed copy.

    With x a logit, r the repetition penalty and n how often the token was emitted before the row,
    accepted or not yet verified drafts included:

    1. x = -inf for held tokens, at positions before `held_until`, and for those that a grammar
       excludes
    2. x = x + bias
    3. x = x / r if x > 0, else x * r, for tokens of the prompt and of what came before the row
    4. x = x - frequency * n, then x - presence, if n > 0

    Tokens that none of this is about keep their logits' values.

    Args:
      logits: the model's own, in any floating-point type.
      changes: by slot.
      written: by slot. Rows behind the last draft are nobody's.
      parallel: the devices among which the vocabulary is split; the result is split alike.
    """
    return parallel.over_vocabulary(_changed, logits, (changes, written), split_result=True)


def _changed(
    shard: VocabShard, logits: jax.Array, by_row: tuple[SlotChanges, Written]
) -> Float32[Array, "B S V"]:
    """`changed_logits` where this device holds the columns of `shard`."""
    changes, written = by_row
    num_positions, width = logits.shape[1:]
    row = jnp.arange(num_positions, dtype=jnp.int32)[None, :, None]
    x = logits.astype(jnp.float32)
    slot = jnp.arange(len(logits), dtype=jnp.int32)[:, None, None]
    if changes.held_ids.shape[1]:
        early = written.lengths[:, None, None] + row < changes.held_until[:, None, None]
        held = jnp.where(early, _columns(changes.held_ids, shard, width)[:, None], width)
        x = x.at[slot, row, held].set(-jnp.inf, mode="drop")
    if changes.grammar is not None:
        ids = shard.ids(width)
        words = jnp.take(changes.grammar.allowed, ids // 32, axis=2, mode="fill", fill_value=0)
        x = jnp.where(words >> (ids % 32)[None, None] & 1 == 1, x, -jnp.inf)
    if changes.bias_ids.shape[1]:
        biased = _columns(changes.bias_ids, shard, width)[:, None]
        x = x.at[slot, row, biased].add(changes.bias[:, None], mode="drop")
    if changes.penalties is None:
        return x
    repetition, frequency, presence, output_start = (
        penalty[:, None, None] for penalty in changes.penalties
    )
    place = jnp.arange(written.tokens.shape[1], dtype=jnp.int32)[None]
    is_written = place < written.lengths[:, None]
    columns = _columns(jnp.where(is_written, written.tokens, -1), shard, width)
    slot = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
    seen = jnp.zeros((len(logits), width), bool).at[slot, columns].set(True, mode="drop")
    # A narrow table where it can count them all: what it costs is writing it.
    most = written.tokens.shape[1]
    narrow = jnp.int16 if most <= np.iinfo(np.int16).max else jnp.int32
    emitted = (place >= output_start[:, 0]).astype(narrow)
    counts = jnp.zeros((len(logits), width), narrow)
    counts = counts.at[slot, columns].add(emitted, mode="drop")[:, None].astype(jnp.int32)
    drafts = _columns(written.draft_ids, shard, width)
    for draft in range(num_positions - 1):
        same = drafts[:, draft, None, None] == jnp.arange(width, dtype=jnp.int32)[None, None]
        counts += (same & (draft < row)).astype(jnp.int32)

    scaled = jnp.where(x > 0, x / repetition, x * repetition)
    x = jnp.where((seen[:, None] | (counts > 0)) & (repetition != 1), scaled, x)
    # A minimum that changes nothing, but after which no compiler contracts product and difference.
    lost = jnp.minimum(frequency * counts.astype(jnp.float32), jnp.float32(3e38))
    lowered = (counts > 0) & ((frequency != 0) | (presence != 0))
    return jnp.where(lowered, x - lost - presence, x)


def changed_rows(
    x: Float32[Array, "R C"], changes: Annotated[RowChanges, "B S = R"], shard: VocabShard
) -> Float32[Array, "R C"]:
    """The changed logits of whole rows, of this device's columns; the changes are [R, ...]."""
    width = x.shape[1]
    if changes.bias_token_ids is not None and changes.bias is not None:
        row = jnp.arange(len(x), dtype=jnp.int32)[:, None]
        biased = _columns(changes.bias_token_ids, shard, width)
        x = x.at[row, biased].add(changes.bias, mode="drop")
    if changes.allowed is None:
        return x
    ids = shard.ids(width)
    words = jnp.take(changes.allowed, ids // 32, axis=1, mode="fill", fill_value=0)
    return jnp.where(lax.shift_right_logical(words, (ids % 32)[None]) & 1 == 1, x, -jnp.inf)


def _columns(ids: Int32[Array, "B M"], shard: VocabShard, width: int) -> Int32[Array, "B M"]:
    """The columns of ids on this device; `width`, which no column has, for all others."""
    first = shard.ids(width)[0]
    is_here = (ids >= 0) & (ids >= first) & (ids < first + width)
    return jnp.where(is_here, ids - first, width)
