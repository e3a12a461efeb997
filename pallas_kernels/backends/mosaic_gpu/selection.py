"""The exact top K of a row, from the maxima of its parts and the logits of K of these.

1. Choose the K parts with the largest maxima, ties lowest part (`choose_parts`). They contain the
   top K, and since parts are contiguous and in index order, the lowest ids among equal logits too.
2. Read those parts again, and nothing else of the row, and keep what is not below the smallest of
   the K maxima: little more than K logits, if few are equal (`collect_enough`).
3. Rank each of them by counting those before it (`_in_order`).

No step takes one token after the other: K dependent reductions would be what pass 2 waits for.

The file goes from the parts to the whole: logits as ordered integers, the three steps, and
`select_row_top_k`. What a thread does is in `selection_threads`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.mosaic_gpu import compat, reading, thread
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.schedule import WARPGROUP, Index, Layout, Schedule
from pallas_kernels.backends.mosaic_gpu.selection_threads import (
    AT_ONCE,
    LOWEST_KEY,
    NOTHING,
    TIES,
    Candidates,
    choose_of_thread,
    collect_of_thread,
    mirrored_word,
    ranked,
    storing,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, word
from pallas_kernels.numbers.ordered_keys import ordered_keys

# The carries of searches: for a key, and for a key or an id.
Search = tuple[jax.Array, jax.Array, jax.Array]
Collected = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
MAX_PARTS = 2**16 - 1  # what those count
ROOM = 2 * AT_ONCE  # words behind the candidates
# The bits that are zero in keys of float32 values that were 16-bit logits.
FREE_BITS = {"bfloat16": 16, "float16": 13, "float32": 0}


def keys_of(x: jax.Array) -> jax.Array:
    """int32 `ordered_keys` of float32 x without NaN."""
    # The comparison changes nothing, but pass 2 takes 7 % fewer instructions with it (bench.aot).
    return jnp.where(x == 0, 0, ordered_keys(x))


def shortened(keys: jax.Array, dtype: str) -> jax.Array:
    """Ordered keys of logits of this dtype without the bits that carry nothing."""
    return keys >> FREE_BITS[dtype]


def lengthened(keys: jax.Array, dtype: str) -> jax.Array:
    """The ordered keys again."""
    return keys << FREE_BITS[dtype]


def middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """The average of two integers, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


def nth_largest(keys: jax.Array, k: int, largest: jax.Array, *, padded: bool = True) -> jax.Array:
    """An int32 so that exactly k keys are not below it, or the k-th largest key.

    Args:
      keys: [n] int32, more than k of them above `NOTHING`.
      k: a Python int.
      largest: their maximum.
      padded: whether any may be `NOTHING`.
    """

    def closer(state: Search) -> Search:
        low, high, _ = state
        cut = middle(low, high)
        lower, upper = middle(low, cut), middle(cut, high)
        of_lower, of_upper = counts_not_below(keys, lower, upper)
        enough, more = of_lower >= k, of_upper >= k
        found = jnp.where(more, of_upper, jnp.where(enough, of_lower, jnp.int32(0)))
        low = jnp.where(more, upper, jnp.where(enough, lower, low))
        return low, jnp.where(more, high, jnp.where(enough, upper, lower)), found

    def unsure(state: Search) -> jax.Array:
        low, high, above = state
        return (middle(low, high) != low) & (above != k)

    # The smallest of them, by a maximum, which is one instruction a warp and a minimum is not.
    smallest = ~jnp.max(jnp.where(keys == NOTHING, NOTHING, ~keys) if padded else ~keys)
    # k keys are at `low` or above it, fewer at `high`.
    low, _, _ = lax.while_loop(unsure, closer, (smallest, largest + 1, jnp.int32(0)))
    return low


def counts_not_below(
    keys: jax.Array, lower: jax.Array, upper: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The numbers of keys at each of two cuts or above it: at most `MAX_PARTS`, by one sum."""
    above = jnp.where(keys >= lower, jnp.int32(1), jnp.int32(0))
    both = jnp.sum(jnp.where(keys >= upper, jnp.int32(1 + (1 << TIES)), above))
    return both & MAX_PARTS, both >> TIES & MAX_PARTS


def choose_parts(
    keys: jax.Array,
    layout: Layout,
    cut: jax.Array,
    k: int,
    chosen_ref: jax.Ref,
    totals_ref: jax.Ref,
) -> None:
    """Write which keys are above the cut, and of those at it the first ones, k at most.

    Args:
      keys: [n] int32.
      layout: of keys, a `compat.run_layout`.
      cut: at most k keys are above it.
      k: a Python int.
      chosen_ref: [k] i32 in shared memory, out: indices of keys, in no order.
      totals_ref: [4] i32 in shared memory, which is used.
    """
    if keys.shape[0] > MAX_PARTS:
        raise NotImplementedError(
            f"{keys.shape[0]} parts of logits are more than {MAX_PARTS}: "
            'take implementation="xla", or split the vocabulary over devices'
        )

    def body(keys_here: Vector, cut_here: Vector, chosen: Value, totals: Value) -> None:
        mine = thread.words(keys_here)
        choose_of_thread(mine, word(cut_here), k, chosen, totals)

    thread.inline(body, (keys, cut, chosen_ref, totals_ref), (layout, "scalar", None, None), ())


def collect(
    where: Candidates[Readable, Index], cut: jax.Array, cut_id: jax.Array | None
) -> jax.Array:
    """Write every logit above the cut, and of those equal to it the ones of ids below cut_id.

    Args:
      where: see there.
      cut: an ordered key above that of -inf.
      cut_id: int32; None: all of those equal to it.

    Returns:
      Their number, int32; or some number above `capacity`, if there is no room for all of them.
      They are written in any order.
    """
    limited = cut_id is not None
    limit = jnp.int32(where.schedule.vocabulary) if cut_id is None else cut_id
    arguments: tuple[Readable | Index, ...] = (
        where.logits_ref, where.chosen_ref, where.found_ref, where.counter_ref,
        where.first, cut, limit,
    )  # fmt: skip
    layouts: tuple[Layout | str | None, ...] = (None,) * 4 + ("scalar",) * 3
    if where.mask is not None:
        arguments, layouts = (*arguments, *where.mask), (*layouts, None, "scalar")

    def body(
        logits: Value, chosen: Value, found: Value, counter: Value,
        first: Vector, cut_here: Vector, limit_here: Vector,
        words_ref: Value | None = None, start: Vector | None = None,
    ) -> Vector:  # fmt: skip
        mask = None if words_ref is None or start is None else reading.Mask(words_ref, word(start))
        refs = Candidates(
            where.schedule, logits, where.width, word(first), mask, where.parts, chosen, found,
            counter, where.capacity,
        )  # fmt: skip
        ids = word(limit_here) if limited else None
        return thread.scalar(collect_of_thread(refs, word(cut_here), ids))

    count = thread.result((), jnp.int32, compat.GPU.Layout.WG_SPLAT)
    return thread.inline(body, arguments, layouts, count)


def collect_enough(
    where: Candidates[Readable, Index], k: int, cut: jax.Array, largest: jax.Array
) -> jax.Array:
    """Collect the top k, and no more than there is room for; returns how many there are.

    The first cut is that of the parts: where it leaves more, ties or clusters of large logits, it
    is raised by halving the range of keys, and then, among equal logits, that of ids.

    Args:
      where: see there; room for k.
      k: a Python int.
      cut: a key without its free bits (`shortened`), above that of -inf. The top k reach it,
        or all that are above -inf.
      largest: the largest key of the row, without its free bits.
    """
    dtype, room = where.schedule.dtype, where.capacity
    first = collect(where, lengthened(cut, dtype), None)

    def again(state: Collected) -> Collected:
        # Too many are at `low` or above it, fewer than k at `high`; of the logits equal to `low`,
        # fewer than k with those before `low_id`, too many with those before `high_id`.
        _, low, high, low_id, high_id = state
        cut = middle(low, high)
        by_id = cut == low
        cut_id = jnp.where(by_id, middle(low_id, high_id), jnp.int32(where.schedule.vocabulary))
        count = collect(where, lengthened(cut, dtype), cut_id)
        few, many = count < k, count > room
        return (
            count,
            jnp.where(many, cut, low),
            jnp.where(few & ~by_id, cut, high),
            jnp.where(few & by_id, cut_id, low_id),
            jnp.where(many & by_id, cut_id, high_id),
        )

    def unfit(state: Collected) -> jax.Array:
        return (state[0] < k) | (state[0] > room)

    ids = jnp.int32(0), jnp.int32(where.schedule.vocabulary)
    start = (jnp.maximum(first, k), cut, largest + 1, *ids)
    count = lax.while_loop(unfit, again, start)[0]
    return compat.asarray(jnp.where(first > room, count, first))


def _in_order(
    found_ref: jax.Ref, count: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The candidates and their ranks.

    Args:
      found_ref: [2 * capacity + ROOM] i32 in shared memory: `collect`'s.
      count: int32, how many candidates there are, at most `capacity`.
      capacity: a multiple of 128.

    Returns:
      ranks, keys and ids [capacity] int32, the ranks a permutation. Where there is no candidate,
      key `LOWEST_KEY` and id -1, in the last ranks.
    """
    layout = compat.vector_layout()
    kind = thread.result((capacity,), jnp.int32, layout)

    def body(positions: Vector, found: Value, number: Vector) -> tuple[Vector, ...]:
        mine = thread.words(positions)
        columns = zip(*ranked(mine, found, word(number)), strict=True)
        return tuple(thread.elements_like(positions, column) for column in columns)

    arguments = compat.vector_iota(capacity), found_ref, count
    ranks, keys, ids = thread.inline(body, arguments, (layout, None, "scalar"), (kind,) * 3)
    return ranks, keys, ids


def scatter(ref: jax.Ref, start: Index, ranks: jax.Array, values: jax.Array, k: int) -> None:
    """Write each value whose rank is below k to ref[start + rank].

    ref: flat, in global memory; ranks: [n] int32, different; values: [n].
    """

    def body(out: Value, begin: Vector, ranks_here: Vector, values_here: Vector) -> None:
        pairs = zip(thread.words(ranks_here), thread.words(values_here), strict=True)
        for rank, value in pairs:
            thread.when(rank < k, storing(out, word(begin) + rank, value))

    layout = compat.vector_layout()
    thread.inline(body, (ref, start, ranks, values), (None, "scalar", layout, layout), ())


class RowOfLogits(NamedTuple):
    """A row as pass 2 reads it."""

    logits_ref: Readable  # [N * V]
    width: int  # of the array
    first: Index  # where the row starts
    mask: reading.RowMask | None  # of the top K alone: the part maxima were masked before


class Scratch(NamedTuple):
    """References to shared memory."""

    chosen: jax.Ref  # [parts] i32: the parts chosen
    found: jax.Ref  # [2 * capacity + ROOM] i32: candidates, key and id
    counts: jax.Ref  # [4] i32: counts that threads add up to
    counter: jax.Ref  # [4] i32: how many candidates there are


class _Selected(NamedTuple):
    """[capacity] int32 each, in no order; more than K of them."""

    ranks: jax.Array  # a permutation of 0, 1, ...
    keys: jax.Array  # ordered keys; `LOWEST_KEY` where fewer than K logits are above -inf
    ids: jax.Array  # token ids; -1 there


def capacity(k: int) -> int:
    """The number of candidates that there is room for: about twice K, in whole warpgroups."""
    return -(-max(2 * k - 32, 1) // WARPGROUP) * WARPGROUP


def num_chosen(schedule: Schedule, k: int) -> int:
    """How many parts are read again."""
    return min(k, schedule.num_parts)


def selection_scratch(schedule: Schedule, k: int) -> list[Any]:
    """The types of `Scratch`, for k >= 1."""
    return [
        GPU.SMEM((num_chosen(schedule, k),), jnp.int32),
        GPU.SMEM((2 * capacity(k) + ROOM,), jnp.int32),
        GPU.SMEM((4,), jnp.int32),
        GPU.SMEM((4,), jnp.int32),
    ]


def select_row_top_k(
    schedule: Schedule,
    k: int,
    row: RowOfLogits,
    maximum: jax.Array,
    maxima: jax.Array,
    scratch: Scratch,
) -> _Selected:
    """The row's k largest logits, and which place each has among them.

    The row is valid; its largest logit is `maximum`, and maxima are those of `load_part_maxima`.
    """
    keys, layout = part_keys(schedule, maxima)
    chosen = num_chosen(schedule, k)
    largest = shortened(key_of_scalar(maximum), schedule.dtype)
    if k >= schedule.num_parts:
        cut = jnp.int32(NOTHING)
    elif k == 1:
        cut = largest
    else:
        padded = schedule.padded_parts > schedule.num_parts
        cut = nth_largest(keys, k, largest, padded=padded)
    choose_parts(keys, layout, cut, chosen, scratch.chosen, scratch.counts)
    chosen_ref, found_ref, _, counter_ref = scratch
    where = Candidates(schedule, *row, chosen, chosen_ref, found_ref, counter_ref, capacity(k))
    above_infinity = (LOWEST_KEY >> FREE_BITS[schedule.dtype]) + 1  # what is -inf is no candidate
    count = collect_enough(where, k, jnp.maximum(cut, above_infinity), largest)
    return _Selected(*_in_order(scratch.found, count, capacity(k)))


def part_layout(schedule: Schedule) -> Layout:
    """Registers of a row's part maxima: a run of them a thread."""
    return compat.run_layout(schedule.padded_parts, jnp.dtype(schedule.dtype).itemsize)


def load_part_maxima(schedule: Schedule, maxima_ref: Readable, start: Index) -> jax.Array:
    """[padded_parts] in the logits' dtype, of a row whose part maxima start there.

    Early: before it is known whether the row is wanted.
    """
    size, layout = schedule.padded_parts, part_layout(schedule)
    return compat.asarray(thread.load_run_at_once(maxima_ref, start, size, layout))


def part_keys(schedule: Schedule, maxima: jax.Array) -> tuple[jax.Array, Layout]:
    """[padded_parts] ordered integers of the part maxima, and their layout.

    Without the bits that carry nothing, and `NOTHING` where there is no part.
    """
    size, layout = schedule.padded_parts, part_layout(schedule)
    keys = shortened(keys_of(maxima.astype(jnp.float32)), schedule.dtype)
    if size == schedule.num_parts:
        return keys, layout
    here = compat.iota((size,), 0, layout) < schedule.num_parts
    return jnp.where(here, keys, NOTHING), layout


def key_of_scalar(x: jax.Array) -> jax.Array:
    """The key of a number that is not NaN."""

    def body(value: Vector) -> Vector:
        return thread.scalar(mirrored_word(thread.bits_of(word(value))))

    kind = thread.result((), jnp.int32, GPU.Layout.WG_SPLAT)
    return thread.inline(body, (x,), ("scalar",), kind)
