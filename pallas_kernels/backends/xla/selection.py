"""The exact top K of rows from the maxima of contiguous groups.

The K groups with the largest maxima (ties: lowest group) always contain the top K. Put back into
index order, one `lax.top_k` over their logits gives the top K with `lax.top_k`'s own order: ties
lowest id first.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.numbers.ordered_keys import canonical, floats, key_of, ordered_keys
from pallas_kernels.numbers.pieces import in_pairs

WIDEST_GROUP = 128
NARROWEST_GROUP = 8  # the lanes of a vector register in float32

Selected = tuple[jax.Array, jax.Array]  # logits [B, k] float32 and ids [B, k] int32
TwoStages = Callable[[jax.Array, jax.Array, int, int], Selected]  # see `from_groups`


def group_width(vocabulary: int, k: int) -> int | None:
    """Logits per group that make both stages' top_k short; None where one stage is as good."""
    if k == 0:
        return None
    width = 1 << round(math.log2(vocabulary / k) / 2)
    width = min(max(width, NARROWEST_GROUP), WIDEST_GROUP)
    return width if vocabulary // width + k * width <= vocabulary // 2 else None


def selection_size(vocabulary: int, k: int) -> int:
    """How many numbers of a row are ordered: group maxima and candidates, or the whole row."""
    width = group_width(vocabulary, k)
    if width is None:
        return vocabulary if k else 1
    return vocabulary // width + k * width


def group_maxima(x: jax.Array, width: int) -> jax.Array:
    """x [B, V] -> the `ordered_keys` [B, ceil(V / width)] of its groups' largest logits."""
    rows, vocabulary = x.shape
    keys = ordered_keys(x)
    padding = -vocabulary % width
    if padding:
        keys = jnp.pad(keys, ((0, 0), (0, padding)), constant_values=key_of(-jnp.inf, x.dtype))
    return jnp.max(keys.reshape(rows, -1, width), axis=2)


def wider(maxima: jax.Array, times: int) -> jax.Array:
    """The maxima of groups that are `times` as wide: [B, G] -> [B, ceil(G / times)]."""
    if times == 1:
        return maxima
    padding = -maxima.shape[1] % times
    if padding:
        least = np.iinfo(maxima.dtype).min
        maxima = jnp.pad(maxima, ((0, 0), (0, padding)), constant_values=least)
    if times <= 4:  # XLA's CPU compiler would make one slow reduction of this and the one before
        return in_pairs(jnp.maximum, [maxima[:, start::times] for start in range(times)])
    return jnp.max(maxima.reshape(maxima.shape[0], -1, times), axis=2)


def row_maximum(x: jax.Array) -> jax.Array:
    """The largest logit [B] float32 of each row of x [B, V], NaN where one is."""
    return jnp.max(x.astype(jnp.float32), axis=1)


def largest(maxima: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The largest logit [B] float32 of each row, from `group_maxima` [B, G] of logits of dtype."""
    return jnp.max(floats(maxima, dtype).astype(jnp.float32), axis=1)


def select_top_k(
    x: jax.Array, maxima: jax.Array | None, k: int, width: int | None, two_stages: TwoStages
) -> tuple[jax.Array, jax.Array]:
    """x [B, V] -> ids [B, k] int32, logits [B, k] float32, descending, ties lowest id first.

    Missing columns (fewer than k logits above -inf) hold -1 and -inf. Rows with a NaN hold
    anything: `finish` replaces them.

    Args:
      x: the logits.
      maxima: the `group_maxima` of this `width`; None where that is.
      k: how many.
      width: of the groups; None selects from the whole row.
      two_stages: `from_groups`, or what does the same from the maxima of other groups.
    """
    rows = x.shape[0]
    if k == 0:
        return jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, 0), jnp.float32)
    with jax.named_scope("select_top_k"):
        if width is None or maxima is None:
            values, ids = top_k(x.astype(jnp.float32), k)
        else:
            values, ids = two_stages(x, maxima, k, width)
    return jnp.where(values > -jnp.inf, ids, jnp.int32(-1)), values


def from_groups(x: jax.Array, maxima: jax.Array, k: int, width: int) -> Selected:
    """The two stages: logits [B, k] float32 and ids [B, k]."""
    _, groups = top_k(floats(maxima, x.dtype).astype(jnp.float32), k)
    return among(x, jnp.sort(groups, axis=1), k, width)


def among(
    x: jax.Array,
    groups: jax.Array,
    k: int,
    width: int,
    least: jax.Array | None = None,
) -> Selected:
    """The top k of the logits in chosen groups: logits [B, k] float32 and ids [B, k].

    Args:
      x: the logits [B, V].
      groups: [B, C] in ascending order, C >= k.
      k: how many.
      width: of the groups.
      least: [B] float32, none below it is of the top k; None: unknown.
    """
    found, starts = logits_of_groups(x, groups, width)
    if least is not None:
        found = jnp.where(found >= least[:, None, None], found, -jnp.inf)
    values, places = top_k(found.reshape(x.shape[0], groups.shape[1] * width), k)
    ids = jnp.take_along_axis(starts, places // width, axis=1) + places % width
    return values, ids


def logits_of_groups(x: jax.Array, groups: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The logits [B, C, width] float32 of groups [B, C], and the id [B, C] of the first of each."""
    vocabulary = x.shape[1]
    # The last group may be short: it is read from further left, without what is not of it.
    starts = jnp.minimum(groups * width, vocabulary - width)
    found = slices(x, starts, width).astype(jnp.float32)
    if vocabulary % width:
        ids = starts[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None]
        found = jnp.where(ids >= groups[:, :, None] * width, found, -jnp.inf)
    return found, starts


def slices(x: jax.Array, starts: jax.Array, width: int) -> jax.Array:
    """x [B, V], starts [B, G] -> the G slices [B, G, width] of each row."""

    def of_row(row: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.vmap(lambda start: lax.dynamic_slice(row, (start,), (width,)))(starts)

    found: jax.Array = jax.vmap(of_row)(x, starts)
    return found


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of x [B, n] float32 where -0.0 equals 0.0 and NaN is -inf.

    A negative NaN corrupts other values of XLA's GPU top_k for k up to 16
    (https://github.com/openxla/xla/issues/48119).
    """
    values, places = lax.top_k(canonical(x), k)
    return values, places
