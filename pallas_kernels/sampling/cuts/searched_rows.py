"""Rows of logits as a search for their cuts reads them: whole, and a few numbers come out.

What a read sums is the same on every vocabulary shard: whole numbers (`exact_sums`), exchanged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.exact_sums import Mass
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.lowering.row_pieces import summed
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.ordered_keys import floats, ordered_keys
from pallas_kernels.sampling.row_read import RowScale

# A word of 32 bits counts the tokens of 4 keys, of which a segment has fewer than 2**8.
FIELD, WORD, SEGMENT = 8, 32, 128
PIECES, FEW_COLUMNS = 16, 32  # of a row, in which the n-th token with a key is looked for


class SearchedRows(NamedTuple):
    """B rows of logits, of which this device holds the columns of `shard`."""

    logits: Float[Array, "B C"]
    scale: RowScale
    shard: VocabShard

    @property
    def vocab_size(self) -> int:
        return self.shard.size(self.logits.shape[1])

    @property
    def keys(self) -> Array:
        """[B, C] integers of the logits' size."""
        return ordered_keys(self.logits)

    @property
    def wide_keys(self) -> Int32[Array, "B C"]:
        """The keys in 32 bits: a CPU's loop is slow where it has numbers of two sizes."""
        if self.logits.dtype == jnp.bfloat16:
            return ordered_keys(self.logits.astype(jnp.float32)) >> 16
        return self.keys.astype(jnp.int32)

    def weights(self, logits: jax.Array) -> jax.Array:
        """exp((x - m) / T) float32 of logits [B, ...] of the rows."""
        shape = -1, *[1] * (logits.ndim - 1)
        largest, inverse = (x.reshape(shape) for x in self.scale[:2])
        return exponential(scaled(logits.astype(jnp.float32), largest, inverse))

    def values(self, keys: jax.Array) -> jax.Array:
        """The logits of keys, int32, in their dtype."""
        return floats(keys.astype(self.keys.dtype), self.logits.dtype)

    def as_limits(self, keys: jax.Array) -> Array:
        """Keys [B, ...] to compare the rows' with, above which a row without an answer has none.

        Its weights are NaN: no sum of theirs would end a search.
        """
        has_answer = jnp.isfinite(self.scale.largest) & jnp.isfinite(self.scale.inverse)
        has_answer, dtype = has_answer.reshape(-1, *[1] * (keys.ndim - 1)), self.keys.dtype
        return jnp.where(has_answer, keys, np.iinfo(dtype).max)

    def mass_of_key(self, key: jax.Array, by_mass: jax.Array, share: float = 1.0) -> Mass:
        """What a token with this key [B, ...] adds to a sum: its weight, or 1; or a share of it."""
        weight = jnp.where(by_mass, self.weights(self.values(key)), jnp.float32(1))
        digits = exact_sums.digits(weight * jnp.float32(share), self.vocab_size)
        return tuple(lax.bitcast_convert_type(digit, jnp.uint32) for digit in digits)


def sums_above(rows: SearchedRows, keys: jax.Array, by_mass: jax.Array) -> Mass:
    """The sums [B, T] of the weights, or the numbers, of tokens above each of T keys [B, T]."""
    row_keys, vocab_size = rows.wide_keys, rows.vocab_size
    values = jnp.where(by_mass, rows.weights(rows.logits), jnp.float32(1))
    digits = exact_sums.digits_of_tokens(values, vocab_size)
    limits = rows.as_limits(keys)
    # All in one loop: else the weights are computed for each.
    terms = []
    for i in range(keys.shape[1]):
        above = row_keys > limits[:, i, None]
        terms += [jnp.where(above, digit, 0) for digit in digits]
    sums = rows.shard.across_sum(jnp.stack(summed(*terms)))
    sums = sums.reshape(keys.shape[1], len(digits), -1)
    return exact_sums.of_sums(tuple(sums[:, i].T for i in range(len(digits))), vocab_size)


def sums_above_run(
    rows: SearchedRows, top: jax.Array, number: int, by_mass: jax.Array
) -> tuple[jax.Array, Mass]:
    """A run of keys top, top - 1, ... [B, number], and the sums of the tokens above each of them.

    Of logits of 16 bits.
    As `sums_above` of these keys, with less work: tokens with one key have one weight, so behind
    the first sum they are counted.
    """
    vocab_size = rows.vocab_size
    keys = top[:, None] - jnp.arange(number, dtype=jnp.int32)[None]
    sums = lowered_for(
        rows.logits,
        rows.scale,
        top,
        by_mass,
        like=functools.partial(_run_sums, _sums_of, rows.shard, number),
        cpu=functools.partial(_run_sums, _sums_in_fields, rows.shard, number),
        default=functools.partial(_run_sums, _sums_of, rows.shard, number),
    )
    sums = rows.shard.across_sum(sums)
    num_digits = exact_sums.num_digits(vocab_size)
    first = exact_sums.of_sums(tuple(sums[:num_digits]), vocab_size)
    masses = multiplied(rows.mass_of_key(keys[:, :-1], by_mass), sums[num_digits:].T, vocab_size)
    upto = tuple(
        jnp.concatenate([x[:, None], x[:, None] + jnp.cumsum(y, axis=1, dtype=y.dtype)], axis=1)
        for x, y in zip(first, masses, strict=True)
    )
    return keys, exact_sums.carried(upto, vocab_size)


def _run_sums(
    add_up: Callable[[Sequence[jax.Array], jax.Array, int], jax.Array],
    shard: VocabShard,
    number: int,
    logits: Float[Array, "B C"],
    scale: RowScale,
    top: jax.Array,
    by_mass: jax.Array,
) -> Int32[Array, "_ B"]:
    """The digits above `top` added up, and how many tokens have top, top - 1, ...: number - 1."""
    rows = SearchedRows(logits, scale, shard)
    row_keys = rows.wide_keys
    values = jnp.where(by_mass, rows.weights(rows.logits), jnp.float32(1))
    values = jnp.where(row_keys > rows.as_limits(top[:, None]), values, 0)
    digits = exact_sums.digits_of_tokens(values, rows.vocab_size)
    return add_up(digits, top[:, None] - row_keys, number - 1)


def _sums_of(
    digits: Sequence[jax.Array], below: Int32[Array, "B C"], counts: int
) -> Int32[Array, "_ B"]:
    """Sums over rows: of the digits, and of the tokens 0, 1, ... below."""
    return jnp.stack(summed(*digits, *((below == i).astype(jnp.int32) for i in range(counts))))


def _sums_in_fields(
    digits: Sequence[jax.Array], below: Int32[Array, "B C"], counts: int
) -> Int32[Array, "_ B"]:
    """`_sums_of`, on a CPU by half of the instructions: counts are added up in fields of words."""
    end = below.shape[1] // SEGMENT * SEGMENT
    if not end:
        return _sums_of(digits, below, counts)
    words = [
        lax.shift_left(jnp.ones_like(below), below * FIELD - WORD * i)  # 0 beyond the word
        for i in range(-(-counts * FIELD // WORD))
    ]
    segments = [x[:, :end].reshape(x.shape[0], -1, SEGMENT) for x in (*digits, *words)]
    sums = summed(*segments, axis=2)
    fields = [
        (sums[len(digits) + bit // WORD] >> bit % WORD) & (2**FIELD - 1)
        for bit in range(0, counts * FIELD, FIELD)
    ]
    totals = jnp.stack(summed(*sums[: len(digits)], *fields))
    if end == below.shape[1]:
        return totals
    return totals + _sums_of([x[:, end:] for x in digits], below[:, end:], counts)


def multiplied(mass: Mass, number: jax.Array, vocab_size: int) -> Mass:
    """So many times a mass, of arrays of one shape; the number is at most V."""
    count = jnp.minimum(number, vocab_size).astype(jnp.uint32)
    return exact_sums.carried(tuple(count * digit for digit in mass), vocab_size)


def nth_equal(rows: SearchedRows, key: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The id [B] of the n-th token with a key, or of the last one, and its number n."""
    keys, shard = rows.keys, rows.shard
    if shard.axis_name is None:
        return _nth_column(keys, key, number)
    count = (keys == key.astype(keys.dtype)[:, None]).sum(1, dtype=jnp.int32)
    counts = shard.gathered(count)  # [shards, B]
    number = jnp.minimum(number, counts.sum(0, dtype=jnp.int32))
    before = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
    rank = number - jnp.take(before, lax.axis_index(shard.axis_name), axis=0)
    is_on_shard = (rank > 0) & (rank <= count)
    column, _ = _nth_column(keys, key, jnp.maximum(rank, 1))
    first = shard.ids(keys.shape[1])[0]
    return shard.across_sum(jnp.where(is_on_shard, column + first, 0)), number


def _nth_column(keys: jax.Array, key: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The column [B] of the n-th of keys [B, C] that equals `key`, or of the last; and its number.

    It is in one of a few pieces, whose counts tell in which; and there again.
    """
    same, first, nth = key.astype(keys.dtype)[:, None], jnp.zeros_like(key), None
    while keys.shape[1] > FEW_COLUMNS:
        width = keys.shape[1]
        size = -(-width // PIECES)
        begins = [min(i, width - size) for i in range(0, width, size)]  # the last may begin early
        column = jnp.arange(size, dtype=jnp.int32)[None]
        marks = [
            ((keys[:, begin : begin + size] == same) & (column >= i * size - begin)).astype(
                jnp.int32
            )
            for i, begin in enumerate(begins)
        ]
        counts = jnp.stack(summed(*marks), axis=1)
        if nth is None:
            nth = number = jnp.minimum(number, counts.sum(1, dtype=jnp.int32))
        upto = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
        piece = jnp.minimum((upto < number[:, None]).sum(1, dtype=jnp.int32), len(begins) - 1)
        before = jnp.take_along_axis(upto - counts, piece[:, None], axis=1)[:, 0]
        begin = jnp.minimum(piece * size, width - size)
        keys = jax.vmap(functools.partial(_columns, size))(keys, begin)
        keys = jnp.where(column < (piece * size - begin)[:, None], same - 1, keys)
        first, number = first + begin, number - before
    upto = jnp.cumsum(keys == same, axis=1, dtype=jnp.int32)
    if nth is None:
        nth = number = jnp.minimum(number, upto[:, -1])
    return first + (upto < number[:, None]).sum(1, dtype=jnp.int32), nth


def _columns(size: int, row: jax.Array, begin: jax.Array) -> jax.Array:
    return lax.dynamic_slice(row, (begin,), (size,))
