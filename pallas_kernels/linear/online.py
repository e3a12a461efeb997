"""Sums of parts of a row of logits, joined: maxima, scaled sums, counts and the top K."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import xla
from pallas_kernels.linear.types import RowSums
from pallas_kernels.ordered_keys import strictly_larger
from pallas_kernels.selection import top_k

FEW = 8  # of a part's logits that may be among the top K: sizes by which they are ordered
SOME = 64


def nothing(rows: int, k: int, entropy: bool) -> RowSums:
    """The sums of no column, for R = `rows`."""
    zeros = jnp.zeros(rows, jnp.float32)
    return RowSums(
        maximum=jnp.full(rows, -jnp.inf, jnp.float32),
        sum_exp=zeros,
        weighted=zeros if entropy else None,
        num_larger=jnp.zeros(rows, jnp.int32),
        top_ids=jnp.zeros((rows, k), jnp.int32),
        top_logits=jnp.full((rows, k), -jnp.inf, jnp.float32),
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
    found = xla.row_parts(x, selected, k, None, None, t)
    maximum = jnp.where(jnp.isnan(found.maximum), -jnp.inf, found.maximum)
    weighted = weighted_sum(x, maximum, inverse) if entropy else None
    return RowSums(
        maximum, found.sum_exp, weighted, found.num_larger, found.top_ids, found.top_logits
    )


def weighted_sum(x: jax.Array, maximum: jax.Array, inverse: jax.Array | None) -> jax.Array:
    """The sum of s exp(s), s = (x - maximum) / T: [B] float32, 0 or less. 0 exp(-inf) is 0."""
    reference = jnp.where(jnp.isfinite(maximum), maximum, 0)
    s = x.astype(jnp.float32) - reference[:, None]
    if inverse is not None:
        s = s * inverse[:, None]
    return jnp.sum(jnp.where(s > -jnp.inf, s * jnp.exp(s), 0), axis=1)


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


def with_top_k(
    logits: jax.Array, ids: jax.Array, x: jax.Array, first: jax.Array, by_count: bool
) -> tuple[jax.Array, jax.Array]:
    """The top K [B, K] of what was found and of a later part: logits float32 and ids.

    A later part's ids are larger, so of equal logits those found come first.

    Args:
      logits: [B, K] float32, found before, descending; -inf where there are fewer.
      ids: [B, K] int32, of these.
      x: [B, W] logits of the part.
      first: [] int32, the id of the part's first column.
      by_count: whether a part with few logits above the K-th largest is to cost less, by a branch.
    """
    k, width = logits.shape[1], x.shape[1]
    if k == 0:
        return logits, ids
    live = strictly_larger(x, logits[:, -1:].astype(x.dtype))
    candidates = jnp.where(live, x.astype(jnp.float32), -jnp.inf)
    sizes = [*(m for m in (FEW, SOME) if by_count and m < min(k, width)), min(k, width)]

    def best(size: int) -> tuple[jax.Array, jax.Array]:
        values, places = top_k(candidates, size)
        values, at = top_k(jnp.concatenate([logits, values], axis=1), k)
        both = jnp.concatenate([ids, places + first], axis=1)
        return values, jnp.take_along_axis(both, at, axis=1)

    if len(sizes) == 1:
        return best(sizes[0])
    most = jnp.max(jnp.sum(live, axis=1, dtype=jnp.int32))
    which = sum((most > size).astype(jnp.int32) for size in sizes[:-1])
    found: tuple[jax.Array, jax.Array] = lax.switch(
        which, [lambda size=size: best(size) for size in sizes]
    )
    return found
