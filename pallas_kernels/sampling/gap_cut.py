"""The cut of rows that min-p alone cuts, where they keep more tokens than their read's candidates.

min-p keeps what is not too far below the largest logit, and that is known: one more read of the row
sums what is kept, and finds the smallest of it. Nothing is sorted, and nothing is searched for.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels import GroupedRows
from pallas_kernels.numbers import exponential, logarithm
from pallas_kernels.sampling import exact_sums
from pallas_kernels.sampling.parameters import Sampling, Truncation, lowest_gap
from pallas_kernels.sampling.row_read import RowRead, scaled
from pallas_kernels.sampling.some_rows import compacted, scattered


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
    lowest = kept.least.min(axis=1)
    groups = jnp.arange(rows.num_local, dtype=jnp.int32)[None]
    last_group = jnp.max(jnp.where(kept.least == lowest[:, None], groups, 0), axis=1)
    x, ids = rows.tokens(index, rows.first + last_group)
    last_id = jnp.max(jnp.where(x == lowest[:, None], ids, -1), axis=1)
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
