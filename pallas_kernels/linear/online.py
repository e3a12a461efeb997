"""Sums of parts of a row of logits, joined: maxima, scaled sums, counts and the top K."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.contract.types import Outputs, Rows, RowSums


def nothing(rows: int, k: int, entropy: bool) -> RowSums:
    """The sums of no column, for R = `rows`."""
    zeros = jnp.zeros(rows, jnp.float32)
    return RowSums(
        maximum=jnp.full(rows, -jnp.inf, jnp.float32),
        sum_exp=zeros,
        num_larger=jnp.zeros(rows, jnp.int32),
        top_ids=jnp.zeros((rows, k), jnp.int32),
        top_logits=jnp.full((rows, k), -jnp.inf, jnp.float32),
        weighted=zeros if entropy else None,
    )


def read(
    x: jax.Array, selected: jax.Array, k: int, inverse: jax.Array | None, entropy: bool
) -> RowSums:
    """The sums of x [B, W], whose columns may be a part of longer rows.

    Args:
      x: logits.
      selected: [B] float32, the given token's logit.
      k: how many of the largest, at most W.
      inverse: [B] float32, 1 / T of usable temperatures; None: 1.
      entropy: whether `weighted` is wanted.
    """
    t = None if inverse is None else 1 / inverse
    found = xla.row_sums(Rows(x, temperatures=t), selected, Outputs(k, entropy=entropy))
    return found._replace(maximum=jnp.where(jnp.isnan(found.maximum), -jnp.inf, found.maximum))


def rescaled(parts: RowSums, maximum: jax.Array, inverse: jax.Array | None) -> RowSums:
    """The same sums relative to another maximum [R], at least the parts' own."""
    shift = parts.maximum - maximum
    if inverse is not None:
        shift = shift * inverse
    empty = parts.sum_exp == 0  # no logit above -inf: it must not meet an infinite factor
    shift = jnp.where(empty | ~jnp.isfinite(shift), -jnp.inf, shift)
    shift = jnp.where(parts.maximum == maximum, 0, shift)
    factor = jnp.exp(shift)
    weighted = parts.weighted
    if weighted is not None:
        finite = jnp.where(shift > -jnp.inf, shift, 0)
        weighted = (weighted + finite * parts.sum_exp) * factor
    return parts._replace(
        maximum=maximum, sum_exp=jnp.where(empty, 0, parts.sum_exp * factor), weighted=weighted
    )


def joined(a: RowSums, b: RowSums, inverse: jax.Array | None) -> RowSums:
    """The sums of both parts; the top K stay those of `a`."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    a, b = rescaled(a, maximum, inverse), rescaled(b, maximum, inverse)
    weighted = None
    if a.weighted is not None and b.weighted is not None:
        weighted = a.weighted + b.weighted
    return a._replace(
        sum_exp=a.sum_exp + b.sum_exp, weighted=weighted, num_larger=a.num_larger + b.num_larger
    )
