"""Parts of rows become whole: shards of the vocabulary, and tokens that a bias takes out of a read.

The GPU kernels read a row without the tokens that a bias names; `with_biased` puts these back, as
if they were a shard of their own.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import RowParts, RowStatistics
from pallas_kernels.backends.xla.row_entropy import LEAST
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.numbers.ordered_keys import canonical, floats, ordered_keys


def combined(parts: RowStatistics, temperatures: jax.Array | None) -> RowStatistics:
    """The statistics [R] of whole rows, from those of their parts [parts, R].

    temperatures: [R] float32, usable ones.
    """
    maxima, sums, num_larger, weighted = parts
    invalid = jnp.isnan(sums)
    maximum = jnp.where(jnp.isnan(maxima), -jnp.inf, maxima).max(0)
    shifted = maxima - maximum[None]
    if temperatures is not None:
        inverse = jnp.where(jnp.isnan(temperatures), jnp.float32(1), 1 / temperatures)
        shifted = shifted * inverse[None]
    factors = jnp.exp(shifted)
    # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
    scaled = jnp.where(sums == 0, jnp.float32(0), sums * factors)
    sum_exp = jnp.where(invalid.any(0), jnp.float32(jnp.nan), scaled.sum(0))
    if weighted is not None:
        moved = weighted + jnp.maximum(shifted, LEAST) * sums
        weighted = jnp.where(sums == 0, jnp.float32(0), moved * factors).sum(0)
    return RowStatistics(maximum, sum_exp, num_larger.sum(0, dtype=jnp.int32), weighted)


def with_biased(
    parts: RowParts,
    ids: jax.Array,
    logits: jax.Array,
    selected: jax.Array,
    wanted: Wanted,
    temperatures: jax.Array | None,
) -> RowParts:
    """The parts of rows, and of the same rows more tokens: ids [R, D], float32 logits [R, D].

    A logit of -inf stands for no token. selected [R] float32: the given token's logit.
    """
    invalid = jnp.isnan(logits).any(1)
    maximum = jnp.where(jnp.isnan(logits), -jnp.inf, logits).max(1)
    reference = jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)
    scaled = logits - reference[:, None]
    if temperatures is not None:
        inverse = jnp.where(jnp.isnan(temperatures), jnp.float32(1), 1 / temperatures)
        scaled = scaled * inverse[:, None]
    terms = jnp.exp(scaled)
    counted = ordered_keys(selected)[:, None] - (1 if wanted.inclusive else 0)
    mine = RowStatistics(
        maximum,
        jnp.where(invalid, jnp.float32(jnp.nan), terms.sum(1)),
        jnp.sum(ordered_keys(logits) > counted, axis=1, dtype=jnp.int32),
        (terms * jnp.maximum(scaled, LEAST)).sum(1) if wanted.entropy else None,
    )
    others = RowStatistics(parts.maximum, parts.sum_exp, parts.num_larger, parts.weighted)
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), others, mine)
    found = combined(both, temperatures)
    top = in_order(
        jnp.concatenate([parts.top_ids, ids], axis=1),
        jnp.concatenate([parts.top_logits, logits], axis=1),
        wanted.k,
    )
    return RowParts(found.maximum, found.sum_exp, found.num_larger, *top, found.weighted)


def in_order(ids: jax.Array, logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of logits [R, n] float32, ties lowest id first: ids and logits [R, k].

    NaN counts as -inf; k <= n.
    """
    backward = ~ordered_keys(canonical(logits))
    backward, ids = lax.sort((backward, ids), dimension=1, num_keys=2)
    return ids[:, :k], floats(~backward[:, :k], jnp.float32)
