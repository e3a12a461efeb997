"""The cut of rows by top-k, top-p and min-p, without a search.

A filter keeps a prefix of the tokens in descending order, so the sorted candidates are all that a
cut needs, or they are too few and say so. Sums of their weights are whole numbers
(`exact_sums`): a row's cut is the same whether it was found among 64 candidates or 1,024.

Where min-p alone cuts a row and keeps more than its candidates, what it keeps is known: what is not
too far below the largest logit. One more read of the row sums it, and finds the smallest of it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.lowering.choose import lowered_for
from pallas_kernels.lowering.forms import at_place, largest_and_first, logarithm, summed
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.sampling import exact_sums
from pallas_kernels.sampling.parameters import (
    Sampling,
    Truncation,
    compacted,
    lowest_gap,
    scattered,
)
from pallas_kernels.sampling.row_read import RowRead, scaled
from pallas_kernels.sampling.rows import GroupedRows

UNKNOWN = 2**31 - 1  # a length beyond the candidates


def cut_among(
    ids: Int32[Array, "N C"],
    logits: Float32[Array, "N C"],
    row: tuple[Float32[Array, " N"], Float32[Array, " N"], exact_sums.Mass],
    sampling: Sampling,
    vocab_size: int,
    asked: Int32[Array, " N"] | None = None,
) -> tuple[Truncation, Bool[Array, " N"]]:
    """The cuts [N], and which of them are settled: those of other rows are anything.

    Args:
      ids, logits: candidates in descending order; -1 and -inf where a row has no more.
      row: m, 1 / T and the mass of each row.
      sampling: of each row.
      vocab_size: V.
      asked: how many candidates of each row count, at least 1; None: all.
    """
    largest, inverse, total = row
    count = jnp.full(len(logits), logits.shape[1], jnp.int32) if asked is None else asked
    counts = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] < count[:, None]
    logits = jnp.where(counts, logits, -jnp.inf)
    weights = exponential(scaled(logits, largest[:, None], inverse[:, None]))
    sums = _cumulated(weights, vocab_size)

    by_k = (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    first_k = jnp.where(by_k, sampling.top_k, UNKNOWN)
    enough = first_k <= count
    base = _where(by_k & enough, _at(jnp.minimum(first_k, count) - 1, *sums), total)
    wanted = sampling.top_p * exact_sums.to_float(base, vocab_size)
    limit = exact_sums.at_least(jnp.maximum(wanted, 1e-30), vocab_size)  # never nothing
    before = exact_sums.less(sums, tuple(digit[:, None] for digit in limit))
    by_p = sampling.top_p < 1
    gap = (logits - largest[:, None] >= lowest_gap(sampling)[:, None]) & (logits > -jnp.inf)
    marks = before, gap, logits > -jnp.inf
    shorter, within, finite = summed(*(x.astype(jnp.int32) for x in marks))
    complete = (finite < count) | (count == vocab_size)
    first_p = _length(jnp.where(by_p, shorter + 1, UNKNOWN), count)
    # The mass that top-p takes its share of is unknown.
    blind = by_p & by_k & ~enough & ~complete
    first_min = _length(jnp.where(sampling.min_p > 0, within, UNKNOWN), count - 1)
    kept = jnp.minimum(jnp.minimum(first_k, first_p), first_min)
    kept = jnp.where(complete, jnp.minimum(kept, finite), kept)
    settled = (kept <= count) & ~blind

    last = jnp.clip(kept, 1, count) - 1
    cut_logit, cut_id, *mass = _at(last, logits, ids, *sums)
    share, whole = (exact_sums.to_float(one, vocab_size) for one in (tuple(mass), total))
    return Truncation(cut_logit, cut_id, jnp.minimum(logarithm(share / whole), 0.0)), settled


def mass_of(
    logits: Float32[Array, "N C"],
    largest: Float32[Array, " N"],
    inverse: Float32[Array, " N"],
    vocab_size: int,
) -> exact_sums.Mass:
    """The mass [N] of these tokens: the sum of exp((x - m) / T)."""
    weights = exponential(scaled(logits, largest[:, None], inverse[:, None]))
    return exact_sums.total(weights, vocab_size)


def _length(found: jax.Array, most: jax.Array) -> jax.Array:
    """A length of at most so many candidates; beyond, it is unknown."""
    return jnp.where(found <= most, found, UNKNOWN)


def _cumulated(weights: jax.Array, vocab_size: int) -> exact_sums.Mass:
    """The mass [N, C] of the candidates up to each."""
    sums = (jnp.cumsum(digit, axis=1) for digit in exact_sums.digits(weights, vocab_size))
    return exact_sums.of_sums(tuple(sums), vocab_size)


def _at(place: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The entries at one place [N] of each row of arrays [N, C].

    In one loop on a CPU, for which a GPU would keep all of the arrays.
    """

    def like(place: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(place.shape, x.dtype) for x in arrays)

    def in_one_loop(place: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return at_place(place, *arrays)

    def gathered(place: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.take_along_axis(x, place[:, None], axis=1)[:, 0] for x in arrays)

    return lowered_for(place, arrays, like=like, cpu=in_one_loop, default=gathered)


def _where(rows: jax.Array, a: exact_sums.Mass, b: exact_sums.Mass) -> exact_sums.Mass:
    return tuple(jnp.where(rows, x, y) for x, y in zip(a, b, strict=True))


def suffices(sampling: Sampling, vocab_size: int) -> Bool[Array, " N"]:
    """Whether no filter but min-p can cut a row."""
    by_k = (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    return ~by_k & (sampling.top_p >= 1)


def cut_of(
    rows: GroupedRows, found: RowRead, sampling: Sampling, left: jax.Array, cut: Truncation
) -> Truncation:
    """The cuts with those of the rows that are `left` [N] bool: valid, sampled, by min-p alone."""
    index, number = compacted(left)
    words = own_words(rows, found, sampling, index, number)
    part = joined(rows.shard.gathered(words), found, index, rows.vocab_size)
    return scattered(cut, part, index, number)


def own_words(
    rows: GroupedRows,
    found: RowRead,
    sampling: Sampling,
    index: Int32[Array, " R"],
    number: Int32[Array, ""],
) -> Int32[Array, "R _"]:
    """What this device tells the others of the first `number` of the rows `index`.

    The least kept logit of its columns, the last id that has it, and the digits of the kept sum.
    """
    largest, inverse = found.largest[index], found.inverse[index]
    gap = largest, lowest_gap(sampling)[index]
    kept = rows.sums_within(gap, inverse, index, number)  # [R, L]
    weights = kept.sums * exponential(scaled(kept.maxima, largest[:, None], inverse[:, None]))
    # The last of equal ones is the first from behind.
    groups = lax.broadcasted_iota(jnp.int32, kept.least.shape, 1)
    lowest, last_group = largest_and_first(-kept.least, -groups)
    x, ids = rows.tokens(index, rows.first - last_group)
    has, last_id = largest_and_first(jnp.where(x == -lowest[:, None], 0.0, -jnp.inf), -ids)
    lowest, last_id = -lowest, jnp.where(has == 0, -last_id, -1)
    sums = exact_sums.sums(weights, rows.vocab_size)
    return jnp.stack([lax.bitcast_convert_type(lowest, jnp.int32), last_id, *sums], axis=1)


def num_words(vocab_size: int) -> int:
    """How many words of a row `own_words` are."""
    return 2 + exact_sums.num_digits(vocab_size)


def joined(
    every: Int32[Array, "shards R _"], found: RowRead, index: Int32[Array, " R"], vocab_size: int
) -> Truncation:
    """The cuts [R] of the rows `index`, from the words of all devices."""
    lowests = lax.bitcast_convert_type(every[..., 0], jnp.float32)
    lowest = lowests.min(axis=0)
    last_id = jnp.max(jnp.where(lowests == lowest[None], every[..., 1], -1), axis=0)
    digits = every[..., 2:].sum(axis=0, dtype=jnp.int32)
    mass = exact_sums.of_sums(
        tuple(digits[:, place] for place in range(digits.shape[1])), vocab_size
    )
    total = tuple(digit[index] for digit in found.total)
    share, whole = (exact_sums.to_float(one, vocab_size) for one in (mass, total))
    return Truncation(lowest, last_id, jnp.minimum(logarithm(share / whole), 0.0))
