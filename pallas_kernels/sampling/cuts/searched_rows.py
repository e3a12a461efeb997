"""Rows of logits as a search for their cuts reads them: whole, and a few numbers come out.

What a read sums is the same on every vocabulary shard: whole numbers (`exact_sums`), exchanged.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.exact_sums import Mass
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.lowering.row_pieces import summed
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.ordered_keys import floats, ordered_keys
from pallas_kernels.sampling.row_read import RowScale

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

    def weights(self, logits: jax.Array) -> jax.Array:
        """exp((x - m) / T) float32 of logits [B, ...] of the rows."""
        shape = -1, *[1] * (logits.ndim - 1)
        largest, inverse = (x.reshape(shape) for x in self.scale[:2])
        return exponential(scaled(logits.astype(jnp.float32), largest, inverse))

    def values(self, keys: jax.Array) -> jax.Array:
        """The logits of keys, int32, in their dtype."""
        return floats(keys.astype(self.keys.dtype), self.logits.dtype)

    def mass_of_key(self, key: jax.Array, by_mass: jax.Array, share: float = 1.0) -> Mass:
        """What a token with this key [B, ...] adds to a sum: its weight, or 1; or a share of it."""
        weight = jnp.where(by_mass, self.weights(self.values(key)), jnp.float32(1))
        digits = exact_sums.digits(weight * jnp.float32(share), self.vocab_size)
        return tuple(lax.bitcast_convert_type(digit, jnp.uint32) for digit in digits)


def sums_above(rows: SearchedRows, keys: jax.Array, by_mass: jax.Array) -> Mass:
    """The sums [B, T] of the weights, or the numbers, of tokens above each of T keys [B, T]."""
    row_keys, vocab_size = rows.keys, rows.vocab_size
    values = jnp.where(by_mass, rows.weights(rows.logits), jnp.float32(1))
    digits = exact_sums.digits(values, vocab_size)
    # All in one loop: else the weights are computed for each.
    terms = []
    for i in range(keys.shape[1]):
        above = row_keys > keys[:, i, None].astype(row_keys.dtype)
        terms += [jnp.where(above, digit, 0) for digit in digits]
    sums = rows.shard.across_sum(jnp.stack(summed(*terms)))
    sums = sums.reshape(keys.shape[1], len(digits), -1)
    return exact_sums.of_sums(tuple(sums[:, i].T for i in range(len(digits))), vocab_size)


def sums_above_run(
    rows: SearchedRows, top: jax.Array, number: int, by_mass: jax.Array
) -> tuple[jax.Array, Mass]:
    """A run of keys top, top - 1, ... [B, number], and the sums of the tokens above each of them.

    As `sums_above` of these keys, with less work: tokens with one key have one weight, so behind
    the first sum they are counted.
    """
    row_keys, vocab_size = rows.keys, rows.vocab_size
    keys = top[:, None] - jnp.arange(number, dtype=jnp.int32)[None]
    values = jnp.where(by_mass, rows.weights(rows.logits), jnp.float32(1))
    above = row_keys > top[:, None].astype(row_keys.dtype)
    digits = exact_sums.digits(values, vocab_size)
    terms = [jnp.where(above, digit, 0) for digit in digits]
    terms += [
        (row_keys == keys[:, i, None].astype(row_keys.dtype)).astype(jnp.int32)
        for i in range(number - 1)
    ]
    sums = rows.shard.across_sum(jnp.stack(summed(*terms)))
    first = exact_sums.of_sums(tuple(sums[: len(digits)]), vocab_size)
    masses = multiplied(rows.mass_of_key(keys[:, :-1], by_mass), sums[len(digits) :].T, vocab_size)
    upto = tuple(
        jnp.concatenate([x[:, None], x[:, None] + jnp.cumsum(y, axis=1, dtype=y.dtype)], axis=1)
        for x, y in zip(first, masses, strict=True)
    )
    return keys, exact_sums.carried(upto, vocab_size)


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
