"""The cut of rows by top-k, top-p and min-p, from their largest logits.

A filter keeps a prefix of the tokens in descending order, so the sorted candidates are all that a
cut needs, or they are too few and say so. Sums of their weights are whole numbers
(`exact_sums`): a row's cut is the same whether it was found among 64 candidates or 1,024.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.numbers import exponential, logarithm
from pallas_kernels.sampling import exact_sums
from pallas_kernels.sampling.parameters import Sampling, Truncation, lowest_gap
from pallas_kernels.sampling.row_read import scaled

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
    finite = (logits > -jnp.inf).sum(axis=1, dtype=jnp.int32)
    complete = (finite < count) | (count == vocab_size)
    weights = exponential(scaled(logits, largest[:, None], inverse[:, None]))
    sums = _cumulated(weights, vocab_size)

    by_k = (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    first_k = jnp.where(by_k, sampling.top_k, UNKNOWN)
    enough = first_k <= count
    base = _where(by_k & enough, _at(sums, jnp.minimum(first_k, count) - 1), total)
    wanted = sampling.top_p * exact_sums.to_float(base, vocab_size)
    limit = exact_sums.at_least(jnp.maximum(wanted, 1e-30), vocab_size)  # never nothing
    before = exact_sums.less(sums, tuple(digit[:, None] for digit in limit))
    by_p = sampling.top_p < 1
    first_p = _length(jnp.where(by_p, before.sum(axis=1, dtype=jnp.int32) + 1, UNKNOWN), count)
    # The mass that top-p takes its share of is unknown.
    blind = by_p & by_k & ~enough & ~complete
    gap = logits - largest[:, None] >= lowest_gap(sampling)[:, None]
    within = (gap & (logits > -jnp.inf)).sum(axis=1, dtype=jnp.int32)
    first_min = _length(jnp.where(sampling.min_p > 0, within, UNKNOWN), count - 1)
    kept = jnp.minimum(jnp.minimum(first_k, first_p), first_min)
    kept = jnp.where(complete, jnp.minimum(kept, finite), kept)
    settled = (kept <= count) & ~blind

    last = jnp.clip(kept, 1, count) - 1
    mass = exact_sums.to_float(_at(sums, last), vocab_size)
    share = mass / exact_sums.to_float(total, vocab_size)
    cut = Truncation(
        jnp.take_along_axis(logits, last[:, None], axis=1)[:, 0],
        jnp.take_along_axis(ids, last[:, None], axis=1)[:, 0],
        jnp.minimum(logarithm(share), 0.0),
    )
    return cut, settled


def mass_of(
    logits: Float32[Array, "N C"],
    largest: Float32[Array, " N"],
    inverse: Float32[Array, " N"],
    vocab_size: int,
) -> exact_sums.Mass:
    """The mass [N] of these tokens: the sum of exp((x - m) / T)."""
    weights = exponential(scaled(logits, largest[:, None], inverse[:, None]))
    last = jnp.full(len(logits), logits.shape[1] - 1, jnp.int32)
    return _at(_cumulated(weights, vocab_size), last)


def _length(found: jax.Array, most: jax.Array) -> jax.Array:
    """A length of at most so many candidates; beyond, it is unknown."""
    return jnp.where(found <= most, found, UNKNOWN)


def _cumulated(weights: jax.Array, vocab_size: int) -> exact_sums.Mass:
    """The mass [N, C] of the candidates up to each."""
    sums = (jnp.cumsum(part, axis=1) for part in exact_sums.digits(weights, vocab_size))
    return exact_sums.carried(
        tuple(lax.bitcast_convert_type(one, jnp.uint32) for one in sums), vocab_size
    )


def _at(mass: exact_sums.Mass, place: jax.Array) -> exact_sums.Mass:
    """The mass [N] at one place [N] of each row of [N, C]."""
    return tuple(jnp.take_along_axis(digit, place[:, None], axis=1)[:, 0] for digit in mass)


def _where(rows: jax.Array, a: exact_sums.Mass, b: exact_sums.Mass) -> exact_sums.Mass:
    return tuple(jnp.where(rows, x, y) for x, y in zip(a, b, strict=True))
