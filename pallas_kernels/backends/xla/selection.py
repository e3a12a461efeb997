"""The exact top K of rows from the maxima of contiguous groups.

The K groups with the largest maxima (ties: lowest group) always contain the top K. Put back into
index order, one `lax.top_k` over their logits gives the top K with `lax.top_k`'s own order: ties
lowest id first.

On a CPU the same has forms of its own. XLA's `top_k` there takes the longer the more often it meets
a larger value: what is below a bound is left out before.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.lowering import forms, row_pieces, typed
from pallas_kernels.numbers import ordered_keys

WIDEST_GROUP = 128

NARROWEST_GROUP = 8  # the lanes of a vector register in float32


_Selected = tuple[jax.Array, jax.Array]  # logits [B, k] float32 and ids [B, k] int32

FEW_ROWS = 3  # up to here, every operation's start counts
TwoStages = Callable[[jax.Array, jax.Array, int, int], _Selected]  # see `from_groups`


def is_small_batch(x: jax.Array) -> bool:
    """True for at most `FEW_ROWS` rows x [B, ...]; false if the count is symbolic."""
    return isinstance(x.shape[0], int) and x.shape[0] <= FEW_ROWS


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
    whole_width = vocabulary // width * width
    # What is left over by itself: of a padded row XLA's CPU compiler makes a loop of four times.
    maxima = jnp.max(ordered_keys.ordered_keys(x[:, :whole_width]).reshape(rows, -1, width), axis=2)
    if whole_width == vocabulary:
        return maxima
    rest = jnp.max(ordered_keys.ordered_keys(x[:, whole_width:]), axis=1, keepdims=True)
    return jnp.concatenate([maxima, rest], axis=1)


def wider(maxima: jax.Array, times: int) -> jax.Array:
    """The maxima of groups that are `times` as wide: [B, G] -> [B, ceil(G / times)]."""
    if times == 1:
        return maxima
    padded_width = -(-maxima.shape[1] // times) * times
    maxima = row_pieces.filled(maxima, padded_width, np.iinfo(maxima.dtype).min)
    if times <= 4:  # XLA's CPU compiler would make one slow reduction of this and the one before
        return row_pieces.in_pairs(jnp.maximum, [maxima[:, start::times] for start in range(times)])
    return jnp.max(maxima.reshape(maxima.shape[0], -1, times), axis=2)


def row_maximum(x: jax.Array) -> jax.Array:
    """The largest logit [B] float32 of each row of x [B, V], NaN where one is."""
    return jnp.max(x.astype(jnp.float32), axis=1)


def select_top_k(
    x: jax.Array, maxima: jax.Array | None, k: int, width: int | None, two_stages: TwoStages | None
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
        if width is None or maxima is None or two_stages is None:
            values, ids = top_k(x.astype(jnp.float32), k)
        else:
            values, ids = two_stages(x, maxima, k, width)
    return jnp.where(values > -jnp.inf, ids, jnp.int32(-1)), values


def from_groups(x: jax.Array, maxima: jax.Array, k: int, width: int) -> _Selected:
    """The two stages: logits [B, k] float32 and ids [B, k]."""
    _, groups = top_k(ordered_keys.floats(maxima, x.dtype).astype(jnp.float32), k)
    return among(x, jnp.sort(groups, axis=1), k, width)


def among(
    x: jax.Array, groups: jax.Array, k: int, width: int, least: jax.Array | None = None
) -> _Selected:
    """The top k of the logits in chosen groups: logits [B, k] float32 and ids [B, k].

    Args:
      x: the logits [B, V].
      groups: [B, C] in ascending order, C >= k.
      k: how many.
      width: of the groups.
      least: [B] float32, none below it is of the top k; None: unknown.
    """
    logits, starts = logits_of_groups(x, groups, width)
    if least is not None:
        logits = jnp.where(logits >= least[:, None, None], logits, -jnp.inf)
    values, places = top_k(logits.reshape(x.shape[0], groups.shape[1] * width), k)
    ids = jnp.take_along_axis(starts, places // width, axis=1) + places % width
    return values, ids


def logits_of_groups(x: jax.Array, groups: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The logits [B, C, width] float32 of groups [B, C], and the id [B, C] of the first of each."""
    vocabulary = x.shape[1]
    # The last group may be short: it is read from further left, without what is not of it.
    starts = jnp.minimum(groups * width, vocabulary - width)
    logits = slices(x, starts, width).astype(jnp.float32)
    if vocabulary % width:
        ids = starts[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None]
        logits = jnp.where(ids >= groups[:, :, None] * width, logits, -jnp.inf)
    return logits, starts


def slices(x: jax.Array, starts: jax.Array, width: int) -> jax.Array:
    """x [B, V], starts [B, G] -> the G slices [B, G, width] of each row."""

    def of_row(row: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.vmap(lambda start: lax.dynamic_slice(row, (start,), (width,)))(starts)

    return jax.vmap(of_row)(x, starts)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of x [B, n] float32 where -0.0 equals 0.0 and NaN is -inf.

    A negative NaN corrupts other values of XLA's GPU top_k for k up to 16
    (https://github.com/openxla/xla/issues/48119).
    """
    values, places = lax.top_k(ordered_keys.canonical(x), k)
    return values, places


def top_k_of_parts(ids: jax.Array, logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Ids and logits of the top k of rows, from those of their parts [parts, R, K].

    Parts come in the order of their ids, and each part's ties too: `top_k` keeps that order.
    """

    def in_a_row(x: jax.Array) -> jax.Array:  # [R, parts * K]
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)

    values, places = top_k(in_a_row(logits), min(k, ids.shape[0] * ids.shape[2]))
    return jnp.take_along_axis(in_a_row(ids), places, axis=1), values


_HALF = 16  # bits of a key

COUNTED = 16  # pieces of a row that are counted at a time

SEARCHED = 96  # numbers of a row, from which on a search is faster than a sort


def reached_by(keys: jax.Array, k: int) -> jax.Array:
    """A key [B] that at least k of the keys [B, n] reach: the k-th largest, or a little less.

    Of keys of 32 bits, n of them at least `SEARCHED`, the lower 16 bits are 0.
    """
    if keys.shape[1] < SEARCHED:
        return jnp.sort(keys, axis=1)[:, -k]
    shift = 8 * keys.dtype.itemsize - _HALF
    halves = (keys >> shift).astype(jnp.int32)
    lanes = -(-keys.shape[1] // COUNTED)
    halves = row_pieces.filled(halves, COUNTED * lanes, np.iinfo(np.int32).min)
    # Written before the loop, and summed over its middle axis, lane by lane.
    halves = forms.barrier(halves.reshape(keys.shape[0], COUNTED, lanes))

    def step(bit: jax.Array, reached: jax.Array) -> jax.Array:
        higher = reached + (jnp.int32(1 << (_HALF - 1)) >> bit)
        count = (halves >= higher[:, None, None]).sum(axis=1, dtype=jnp.int32)
        return jnp.where(count.sum(axis=1, dtype=jnp.int32) >= k, higher, reached)

    reached = forms.vary_like(jnp.full(keys.shape[:1], np.iinfo(np.int16).min, jnp.int32), keys)
    reached = typed.fori_loop(0, _HALF, step, reached)
    return reached.astype(keys.dtype) << shift


def from_groups_on_cpu(x: jax.Array, maxima: jax.Array, k: int, width: int) -> _Selected:
    """`from_groups`, without what is below a bound that is known before anything is ordered."""
    bound = lower_bound(maxima, k)
    if bound is not None:
        maxima = jnp.where(maxima >= bound[:, None], maxima, ordered_keys.key_of(-jnp.inf, x.dtype))
    # Not `top_k`: floats of keys are canonical, and few operations are left to one thread.
    largest, groups = lax.top_k(ordered_keys.floats(maxima, x.dtype).astype(jnp.float32), k)
    # A minimum, not the last column: where XLA sees a slice of top_k's result, it sorts all n.
    return among(x, jnp.sort(groups, axis=1), k, width, jnp.min(largest, axis=1))


def lower_bound(maxima: jax.Array, k: int) -> jax.Array | None:
    """A key [B] that at least k maxima of each row [B, G] reach, and few more; None if k is large.

    It is the k-th largest of the maxima of wider groups, of which there are 1.5 to 3 times k.
    """
    times = 1
    while maxima.shape[1] // (2 * times) > 1.5 * k:
        times *= 2
    if times == 1:
        return None
    width = -(-maxima.shape[1] // times)
    padded = row_pieces.filled(maxima, times * width, np.iinfo(maxima.dtype).min)
    return reached_by(padded.reshape(maxima.shape[0], times, width).max(axis=1), k)
