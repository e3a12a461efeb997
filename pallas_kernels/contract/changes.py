"""Changes of logits that are applied while they are read: forbidden tokens, and a sparse bias.

The changed logit of token t is

    -inf                      where a bit mask forbids t, whatever its logit and its bias
    x[t] + sum of its biases  in float32, where a bias names t: x is widened, and not rounded back
    x[t]                      elsewhere

Everything else is computed from the changed logits as from any others. Biases of one id are added
to one another first, in an order that depends on their number alone: every implementation adds the
same sum to a logit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract.field_docs import with_field_docs

WORD = 32  # bits


@with_field_docs
class Changes(NamedTuple):
    """Changes of R rows; None where nothing is changed so.

    Attributes:
      allowed: [R, ceil(V / 32)] int32 or uint32: bit j of word w allows id 32 w + j.
      bias_token_ids: [R, D] int32; outside [0, V): not used.
      bias: [R, D] float32.
    """

    allowed: jax.Array | None = None
    bias_token_ids: jax.Array | None = None
    bias: jax.Array | None = None


def prepared(changes: Changes | None, vocab_size: int) -> Changes | None:
    """The same changes as the other functions take them: words are int32, a row's ids distinct.

    -1 stands for ids outside [0, vocab_size), and -2 - id for an id that another place has with the
    sum of its biases: the ids that are meant stay in order, and a kernel finds one by halving.
    """
    if changes is None:
        return None
    if changes.allowed is not None:
        changes = changes._replace(allowed=changes.allowed.astype(jnp.int32))
    if changes.bias is None or changes.bias_token_ids is None:
        return changes
    ids = changes.bias_token_ids
    ids = jnp.where((ids >= 0) & (ids < vocab_size), ids, jnp.int32(-1))
    ids, bias = lax.sort((ids, changes.bias), dimension=1, num_keys=1)
    # Sums of 1, 2, 4, ... equal ids that end at each place; the last place of an id has them all.
    distance = 1
    while distance < ids.shape[1]:
        same = _shifted(ids, distance, -2) == ids
        bias = jnp.where(same, bias + _shifted(bias, distance, 0), bias)
        distance *= 2
    is_last = ids != _shifted(ids, -1, -2)
    return changes._replace(bias_token_ids=jnp.where(is_last, ids, -2 - ids), bias=bias)


def _shifted(x: jax.Array, by: int, fill: float) -> jax.Array:
    """x [R, D] moved to the right, or to the left for by < 0."""
    width = x.shape[1]
    edges = (max(by, 0), max(-by, 0))
    filled = jnp.pad(x, ((0, 0), edges), constant_values=fill)
    return lax.slice_in_dim(filled, edges[1], edges[1] + width, axis=1)


def of_shard(changes: Changes | None, first: jax.Array, width: int) -> Changes | None:
    """The changes of `width` columns from id `first` on, which become ids from 0 on."""
    if changes is None:
        return None
    allowed, ids, bias = changes
    if allowed is not None:
        count = -(-width // WORD)
        # The columns may end after V, and begin inside a word.
        padded = jnp.pad(allowed, ((0, 0), (0, count + 1)))
        start = jnp.minimum(first // WORD, allowed.shape[1])
        words = lax.dynamic_slice_in_dim(padded, start, count + 1, axis=1)
        by = (first % WORD).astype(jnp.int32)
        low = lax.shift_right_logical(words[:, :-1], jnp.broadcast_to(by, words[:, 1:].shape))
        # In two steps: a shift by 32 has no defined result.
        high = (words[:, 1:] << 1) << (WORD - 1 - by)
        allowed = low | high
    if ids is not None:
        inside = (ids >= first) & (ids < first + width)
        ids = jnp.where(inside, ids - first, jnp.int32(-1))
    return Changes(allowed, ids, bias)


def apply(x: jax.Array, changes: Changes | None) -> jax.Array:
    """The changed logits of x [B, V]: float32 with a bias, else of x's dtype."""
    if changes is None:
        return x
    rows, vocabulary = x.shape
    if changes.bias is not None and changes.bias_token_ids is not None:
        ids = changes.bias_token_ids
        places = jnp.where(ids < 0, jnp.int32(vocabulary), ids)  # behind the row: dropped
        index = jnp.arange(rows, dtype=jnp.int32)[:, None]
        x = x.astype(jnp.float32).at[index, places].add(changes.bias, mode="drop")
    if changes.allowed is not None:
        x = jnp.where(_unpacked(changes.allowed, vocabulary), x, jnp.asarray(-jnp.inf, x.dtype))
    return x


def apply_at(logits: jax.Array, ids: jax.Array, changes: Changes | None) -> jax.Array:
    """The changed logits of float32 logits [R, C] that are those of ids [R, C], each in [0, V)."""
    if changes is None:
        return logits
    if changes.bias is not None and changes.bias_token_ids is not None:
        same = ids[:, :, None] == changes.bias_token_ids[:, None]
        added = jnp.sum(jnp.where(same, changes.bias[:, None], jnp.float32(0)), axis=2)
        logits = jnp.where(same.any(axis=2), logits + added, logits)
    if changes.allowed is not None:
        logits = jnp.where(_is_allowed(changes.allowed, ids), logits, -jnp.inf)
    return logits


def _is_allowed(words: jax.Array, ids: jax.Array) -> jax.Array:
    """Whether the bit mask words [R, W] allow ids [R, C], each in [0, 32 W)."""
    word = jnp.take_along_axis(words, ids // WORD, axis=1)
    return (lax.shift_right_logical(word, ids % WORD) & 1) == 1


def unbiased(changes: Changes, width: int) -> jax.Array:
    """Bit mask words [R, ceil(width / 32)] int32 of allowed ids that no bias names."""
    words, ids, bias = changes
    if bias is None or ids is None:
        assert words is not None
        return words
    count = -(-width // WORD)
    if words is None:
        words = jnp.full((ids.shape[0], count), -1, jnp.int32)
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    places = jnp.where(ids < 0, jnp.int32(count), ids // WORD)
    bits = jnp.where(_is_allowed(words, jnp.maximum(ids, 0)), jnp.int32(1) << (ids % WORD), 0)
    # Different bits, each of them set: a subtraction clears it and carries nothing.
    return words.at[rows, places].add(-bits, mode="drop")


def biased(logits: jax.Array, rows: jax.Array, changes: Changes) -> tuple[jax.Array, jax.Array]:
    """Ids and changed logits [R, D] float32 of what biases name, -inf where they name nothing.

    logits: [N, V]; rows: [R], each in [0, N).
    """
    allowed, ids, bias = changes
    assert bias is not None
    assert ids is not None
    inside = jnp.maximum(ids, 0)
    logits_with_bias = logits.at[rows[:, None], inside].get().astype(jnp.float32) + bias
    named = ids >= 0
    if allowed is not None:
        named &= _is_allowed(allowed, inside)
    return ids, jnp.where(named, logits_with_bias, -jnp.inf)


def of_rows(changes: Changes | None, rows: jax.Array) -> Changes | None:
    """The changes of some rows [P] of those that there are; a row outside of them is clamped."""
    of_these: Changes | None = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), changes)
    return of_these


def of_columns(changes: Changes | None, first: jax.Array, width: int) -> Changes | None:
    """The changes of `width` columns of each row [P], which become ids from 0 on.

    first: [P], the id of each row's first column, a multiple of 32.
    """
    if changes is None:
        return None
    allowed, ids, bias = changes
    if allowed is not None:
        words = jnp.arange(-(-width // WORD), dtype=jnp.int32)[None]
        place = first[:, None] // WORD + words
        allowed = jnp.take_along_axis(allowed, place, axis=1, mode="clip")
    if ids is not None:
        inside = (ids >= first[:, None]) & (ids < first[:, None] + width)
        ids = jnp.where(inside, ids - first[:, None], jnp.int32(-1))
    return Changes(allowed, ids, bias)


def _unpacked(words: jax.Array, vocabulary: int) -> jax.Array:
    """words [B, W] -> [B, V] bool."""
    bits = jnp.arange(WORD, dtype=jnp.int32)[None, None]
    flags: jax.Array = (words[:, :, None] & (jnp.int32(1) << bits)) != 0
    return flags.reshape(words.shape[0], words.shape[1] * WORD)[:, :vocabulary]
