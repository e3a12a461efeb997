"""The cut of rows by top-k, top-p and min-p, without a search.

A filter keeps a prefix of the tokens in descending order, so the sorted candidates are all that a
cut needs, or they are too few and say so. Sums of their weights are whole numbers
(`exact_sums`): a cut is the same whether it was found among 64 candidates, 128, or by a search.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.lowering.row_pieces import at_place, summed
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.sampling.parameters import Sampling, Truncation, lowest_gap
from pallas_kernels.sampling.row_read import RowScale

_UNKNOWN = 2**31 - 1  # a length beyond the candidates


def cut_among(
    ids: Int32[Array, "N C"],
    logits: Float32[Array, "N C"],
    scale: RowScale,
    sampling: Sampling,
    vocab_size: int,
    num_counted: Int32[Array, " N"] | None = None,
) -> tuple[Truncation, Bool[Array, " N"]]:
    """The cuts [N], and which of them are settled: those of other rows are anything.

    Args:
      ids, logits: candidates in descending order; -1 and -inf where a row has no more.
      scale: of each row.
      sampling: of each row.
      vocab_size: V.
      num_counted: how many candidates of each row count, at least 1; None: all.
    """
    largest, inverse, total = scale
    count = (
        jnp.full(logits.shape[0], logits.shape[1], jnp.int32)
        if num_counted is None
        else num_counted
    )
    counts = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] < count[:, None]
    logits = jnp.where(counts, logits, -jnp.inf)
    weights = prevent_recompute(exponential(scaled(logits, largest[:, None], inverse[:, None])))
    digits = jnp.stack(exact_sums.digits(weights, vocab_size))
    sums = exact_sums.of_sums(
        tuple(jnp.cumsum(digits, axis=2, dtype=digits.dtype)), vocab_size
    )  # up to each candidate

    by_k = (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    first_k = jnp.where(by_k, sampling.top_k, _UNKNOWN)
    enough = first_k <= count
    base = _where(by_k & enough, _at(jnp.minimum(first_k, count) - 1, *sums), total)
    target = sampling.top_p * exact_sums.to_float(base, vocab_size)
    limit = exact_sums.at_least(jnp.maximum(target, 1e-30), vocab_size)  # never nothing
    before = exact_sums.less(sums, tuple(digit[:, None] for digit in limit))
    by_p = sampling.top_p < 1
    gap = (logits - largest[:, None] >= lowest_gap(sampling)[:, None]) & (logits > -jnp.inf)
    marks = before, gap, logits > -jnp.inf
    shorter, within, finite = summed(*(x.astype(jnp.int32) for x in marks))
    complete = finite < count  # where all V are candidates, keeping them is keeping everything
    first_p = _length(jnp.where(by_p, shorter + 1, _UNKNOWN), count)
    # The mass that top-p takes its share of is unknown.
    blind = by_p & by_k & ~enough & ~complete
    first_min = _length(jnp.where(sampling.min_p > 0, within, _UNKNOWN), count - 1)
    length = jnp.minimum(jnp.minimum(first_k, first_p), first_min)
    length = jnp.where(complete, jnp.minimum(length, finite), length)
    settled = (length <= count) & ~blind

    last = jnp.clip(length, 1, count) - 1
    cut_logit, cut_id, *mass = _at(last, logits, ids, *sums)
    share, row_mass = (exact_sums.to_float(value, vocab_size) for value in (tuple(mass), total))
    return Truncation(cut_logit, cut_id, jnp.minimum(logarithm(share / row_mass), 0.0)), settled


def _length(length: jax.Array, most: jax.Array) -> jax.Array:
    """A length of at most so many candidates; beyond, it is unknown."""
    return jnp.where(length <= most, length, _UNKNOWN)


def _at(place: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The entries at one place [N] of each row of arrays [N, C].

    In one loop on a CPU, for which a GPU would keep all of the arrays.
    """

    def gathered(place: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.take_along_axis(x, place[:, None], axis=1)[:, 0] for x in arrays)

    return lowered_for(place, arrays, like=gathered, cpu=at_place, default=gathered)


def _where(rows: jax.Array, a: exact_sums.Mass, b: exact_sums.Mass) -> exact_sums.Mass:
    return tuple(jnp.where(rows, x, y) for x, y in zip(a, b, strict=True))
