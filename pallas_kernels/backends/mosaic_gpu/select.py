"""Selection in pass 2 on a GPU: the exact top K of a row from its group maxima and K of its groups.

The warpgroup that serves the row does this:

1. Choose the K groups with the largest maxima, ties lowest group (`groups`). They contain the top
   K, and since groups are contiguous and in index order, the lowest ids among equal logits too.
2. Read those groups again, and nothing else of the row, and keep what is not below the smallest of
   the K maxima: little more than K logits, if few are equal (`candidates`).
3. Rank each of them by counting those before it (`order`).

No step takes one token after the other: K dependent reductions would be what pass 2 waits for.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.mosaic_gpu import chosen as groups
from pallas_kernels.backends.mosaic_gpu import compat, early, order, thread
from pallas_kernels.backends.mosaic_gpu.candidates import Candidates, collect_enough
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.keys import (
    FREE_BITS,
    LOWEST_KEY,
    NOTHING,
    ordered_keys,
    shortened,
)
from pallas_kernels.backends.mosaic_gpu.mask import Mask
from pallas_kernels.backends.mosaic_gpu.tiling import WARPGROUP, Tiling

NO_POSITION = 2**31 - 1
SCAN_WIDTH = 1024


class RowOfLogits(NamedTuple):
    """A row as pass 2 reads it."""

    logits_ref: Any  # [N * V]
    first: Any  # where the row starts
    skew: Any  # `Tiling.skew`
    mask: Mask | None  # of the top K alone: the group maxima were masked before
    interpreted: bool

    def load(self, start: Any, size: int) -> jax.Array:
        """[size] float32 from an id of the row."""
        x = compat.load_vector(self.logits_ref, self.first + start, size, self.interpreted)
        return x.astype(jnp.float32)


class Scratch(NamedTuple):
    """References to shared memory."""

    chosen: Any  # [groups] i32: the groups chosen
    found: Any  # [2 * capacity + order.ROOM] i32: candidates, key and id
    counts: Any  # [4] i32: counts that threads add up to
    counter: Any  # [4] i32: how many candidates there are


class Selected(NamedTuple):
    """[capacity] int32 each, in no order; more than K of them."""

    ranks: jax.Array  # a permutation of 0, 1, ...
    keys: jax.Array  # ordered keys; `LOWEST_KEY` where fewer than K logits are above -inf
    ids: jax.Array  # token ids; -1 there


def capacity(k: int) -> int:
    """The number of candidates that there is room for: about twice K, in whole warpgroups."""
    return -(-max(2 * k - 32, 1) // WARPGROUP) * WARPGROUP


def num_chosen(tiling: Tiling, k: int) -> int:
    """How many groups are read again."""
    return min(k, tiling.num_groups)


def scratch_types(tiling: Tiling, k: int) -> list[Any]:
    """The types of `Scratch`, for k >= 1."""
    return [
        GPU.SMEM((num_chosen(tiling, k),), jnp.int32),
        GPU.SMEM((2 * capacity(k) + order.ROOM,), jnp.int32),
        GPU.SMEM((4,), jnp.int32),
        GPU.SMEM((4,), jnp.int32),
    ]


def select_top_k(
    tiling: Tiling,
    k: int,
    row: RowOfLogits,
    maximum: jax.Array,
    maxima: jax.Array,
    scratch: Scratch,
) -> Selected:
    """The row's k largest logits, and which place each has among them.

    The row is valid; its largest logit is `maximum`, and maxima are those of `load_group_maxima`.
    """
    keys, layout = group_keys(tiling, maxima)
    chosen = num_chosen(tiling, k)
    largest = shortened(key_of_scalar(maximum, row.interpreted), tiling.dtype)
    if k >= tiling.num_groups:
        cut = jnp.int32(NOTHING)
    elif k == 1:
        cut = largest
    else:
        padded = tiling.padded_groups > tiling.num_groups
        cut = groups.nth_largest(keys, k, largest, padded=padded)
    groups.choose(keys, layout, cut, chosen, scratch.chosen, scratch.counts, row.interpreted)
    where = Candidates(
        tiling,
        row.logits_ref,
        row.first,
        row.skew,
        row.mask,
        chosen,
        scratch.chosen,
        scratch.found,
        scratch.counter,
        capacity(k),
        row.interpreted,
    )
    above_infinity = (LOWEST_KEY >> FREE_BITS[tiling.dtype]) + 1  # what is -inf is no candidate
    count = collect_enough(where, k, jnp.maximum(cut, above_infinity), largest)
    return Selected(*order.in_order(scratch.found, count, capacity(k), row.interpreted))


def group_layout(tiling: Tiling) -> Any:
    """Registers of a row's group maxima: a run of them a thread."""
    return compat.run_layout(tiling.padded_groups, jnp.dtype(tiling.dtype).itemsize)


def load_group_maxima(tiling: Tiling, groups_ref: Any, start: Any, interpreted: bool) -> jax.Array:
    """[padded_groups] in the logits' dtype, of a row whose group maxima start there.

    Early, where threads load whole words: before it is known whether the row is wanted.
    """
    size, layout = tiling.padded_groups, group_layout(tiling)
    half_words = jnp.dtype(tiling.dtype).itemsize == 2 and size // WARPGROUP % 2 == 1
    if interpreted or half_words:
        return compat.load_run(groups_ref, start, size, layout, interpreted)
    return compat.asarray(early.load_run_at_once(groups_ref, start, size, layout))


def group_keys(tiling: Tiling, maxima: jax.Array) -> tuple[jax.Array, Any]:
    """[padded_groups] ordered integers of the group maxima, and their layout.

    Without the bits that carry nothing, and `NOTHING` where there is no group.
    """
    size, layout = tiling.padded_groups, group_layout(tiling)
    keys = shortened(ordered_keys(maxima.astype(jnp.float32), nan=False), tiling.dtype)
    if size == tiling.num_groups:
        return keys, layout
    here = compat.iota((size,), 0, layout) < tiling.num_groups
    return jnp.where(here, keys, NOTHING), layout


def key_of_scalar(x: jax.Array, interpreted: bool) -> jax.Array:
    """`ordered_keys` of a number that is not NaN: Pallas has no bitcast of numbers on a GPU."""
    if interpreted:
        return ordered_keys(x)

    def body(value: Any) -> Any:
        bits = thread.bits_of(thread.word(value))
        key = thread.select(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return thread.scalar(thread.select(thread.word(value) == 0.0, 0, key))

    kind = thread.result((), jnp.int32, GPU.Layout.WG_SPLAT)
    key: jax.Array = thread.inline(body, (x,), ("scalar",), kind)
    return key


def first_largest(tiling: Tiling, row: RowOfLogits) -> jax.Array:
    """The lowest id among the row's largest non-NaN logits; 0 if all are NaN."""
    positions = compat.vector_iota(SCAN_WIDTH)
    last = tiling.vocabulary - SCAN_WIDTH

    def look(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best_keys, best_ids = best
        start = jnp.minimum(i * SCAN_WIDTH, last)
        keys = ordered_keys(row.load(start, SCAN_WIDTH))
        larger = keys > best_keys  # an equal one keeps the lower id
        ids = jnp.where(larger, start + positions, best_ids)
        return jnp.where(larger, keys, best_keys), ids

    nothing = compat.full(SCAN_WIDTH, NOTHING)
    steps = -(-tiling.vocabulary // SCAN_WIDTH)
    keys, ids = lax.fori_loop(0, steps, look, (nothing, positions))
    return jnp.min(jnp.where(keys == jnp.max(keys), ids, NO_POSITION))
