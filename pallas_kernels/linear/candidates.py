"""The running top K of rows whose logits come a part at a time, in the forms a CPU is fast at.

The K largest so far, and behind them room for candidates: logits of later parts that are larger
than the K-th largest was when room was last made. A part has the fewer of them the later it comes.
Candidates are found and moved by words of bits, and nothing is put in order before the end:

    append    a part's candidates go into the room, a few of each row at a time
    shrink    the room is full: nearly the K-th largest is found by bisection, what is below it goes
    ordered   at the end, by counting how many are larger

Candidates stay in the order of their ids, so the first of equal ones has the lowest. All loops
carry the arrays in place; even a condition is a loop: XLA would copy them around a branch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backends.xla import bit_words
from pallas_kernels.backends.xla.selection import top_k
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import barrier, vary_like
from pallas_kernels.numbers.ordered_keys import floats, key_of, ordered_keys, strictly_larger

FEW, MORE = 8, 16  # of each row, that are appended at a time; more for K above SMALL_K
SMALL_K = 64
COLUMNS_AT_ONCE = 1024  # of a part that are looked at together
ROWS_AT_ONCE = 128  # rows that are shrunk or ordered at a time
UNROLL = 8


Three = tuple[jax.Array, jax.Array, jax.Array]


class Running(NamedTuple):
    """The candidates of B rows, for K and room for E more."""

    keys: jax.Array  # [B, K + E] int32, `ordered_keys` of float32 logits; of -inf where is none
    ids: jax.Array  # [B, K + E] int32
    floor: jax.Array  # [B] int32, no smaller key is of the top K
    used: jax.Array  # [] int32, of the room


class BestColumns(NamedTuple):
    """The top K of B rows, descending, ties lowest id first."""

    logits: jax.Array  # [B, K] float32
    ids: jax.Array  # [B, K] int32


def empty(rows: int, k: int, room: int) -> Running:
    """Nothing yet, for `rows` rows."""
    least = key_of(-jnp.inf, jnp.float32)
    shape = (rows, k + room)
    return Running(
        jnp.full(shape, least), jnp.zeros(shape, jnp.int32), jnp.full(rows, least), jnp.int32(0)
    )


def appended(running: Running, x: jax.Array, first: jax.Array, k: int) -> Running:
    """The candidates with those of a part too.

    Args:
      running: what was found before.
      x: [B, W] logits of the part.
      first: [] int32, the id of the part's first column.
      k: K.
    """
    width = x.shape[1]
    if width <= COLUMNS_AT_ONCE:
        return _appended(running, x, first, k)
    most = -(-width // -(-width // COLUMNS_AT_ONCE))

    def some(i: jax.Array, running: Running) -> Running:
        start = jnp.minimum(i * most, width - most)
        columns = lax.dynamic_slice_in_dim(x, start, most, 1)
        new = start + jnp.arange(most, dtype=jnp.int32) >= i * most
        if width % most:
            columns = jnp.where(new[None], columns, jnp.asarray(-jnp.inf, x.dtype))
        return _appended(running, columns, first + start, k)

    return typed.fori_loop(0, -(-width // most), some, vary_like(running, (running, x)))


def _appended(running: Running, x: jax.Array, first: jax.Array, k: int) -> Running:
    running, x, first = vary_like((running, x, first), (running, x, first))

    def larger_than(keys: jax.Array, x: jax.Array = x) -> jax.Array:
        floor = floats(keys, jnp.float32).astype(x.dtype)
        return bit_words.packed(strictly_larger(x, floor[:, None]))

    words = larger_than(running.floor)
    most = jnp.max(bit_words.counts(words))
    if x.shape[1] > k:
        # Of more than K, those below the part's own K-th largest do not count.
        def fewer(carry: Three) -> Three:
            words, _, _ = carry
            pinned = barrier((x, words))[0]  # tied: else XLA would always search
            least = kth_largest(pinned, k, k)
            below = ordered_keys(floats(least - 1, x.dtype).astype(jnp.float32))
            words &= larger_than(below, pinned)
            fewest = jnp.max(bit_words.counts(words))
            return words, fewest, vary_like(jnp.bool_(True), words)

        words, most, _ = lax.while_loop(
            lambda carry: (carry[1] > k) & ~carry[2],
            fewer,
            vary_like((words, most, jnp.bool_(False)), words),
        )

    size = FEW if k <= SMALL_K else MORE

    def append(carry: tuple[jax.Array, Running]) -> tuple[jax.Array, Running]:
        done, running = carry
        free = running.keys.shape[1] - k
        running = lax.while_loop(
            lambda running: running.used + size > free,
            lambda running: shrunk(running, k, k + free // 4),
            running,
        )
        at, there = barrier(bit_words.places(words, done, size))
        logits = jnp.take_along_axis(x, at, axis=1, mode="promise_in_bounds")
        keys = ordered_keys(logits.astype(jnp.float32))
        keys = barrier(jnp.where(there, keys, key_of(-jnp.inf, jnp.float32)))
        begin = (jnp.int32(0), k + running.used)
        return done + size, Running(
            lax.dynamic_update_slice(running.keys, keys, begin),
            lax.dynamic_update_slice(running.ids, at + first, begin),
            running.floor,
            running.used + jnp.minimum(size, most - done),
        )

    carry = vary_like((jnp.int32(0), running), (words, running, x))
    return lax.while_loop(lambda carry: carry[0] < most, append, carry)[1]


def kth_largest(
    x: jax.Array,
    k: int,
    most: int,
    low: jax.Array | int | None = None,
    high: jax.Array | int | None = None,
) -> jax.Array:
    """A key [B] that at least k of each row of x [B, n] reach, and at most `most` if it can be.

    It is found by bisection: at the end, it is the largest key that at least k reach.

    Args:
      x: floats, or `ordered_keys`.
      k: at least.
      most: the search goes on while a row has more.
      low: [B] or [], a key that at least k of each row reach; None: the lowest.
      high: [B] or [], a key above `low` that fewer than k reach; None: the highest.
    """
    is_key = jnp.issubdtype(x.dtype, jnp.integer)
    key = x.dtype if is_key else jnp.dtype(f"int{8 * x.dtype.itemsize}")
    limits = np.iinfo(key)

    def step(carry: Three) -> Three:
        least, beyond, number = carry
        middle = (least & beyond) + ((least ^ beyond) >> 1)  # their mean, without their sum
        # No keys of the floats, and tied: XLA would have integers of all of x before the loop.
        if is_key:
            reach = x >= middle[:, None]
        else:
            below = floats(middle - 1, x.dtype)
            reach = strictly_larger(barrier((x, least))[0], below[:, None])
        # Counted in float32, exact below 2**24: on a CPU faster than in int32.
        count = jnp.sum(reach.astype(jnp.float32), axis=1)
        enough = (count >= k) & (middle > least)
        beyond = jnp.where(count >= k, beyond, middle)
        return jnp.where(enough, middle, least), beyond, jnp.where(enough, count, number)

    def unfinished(carry: Three) -> jax.Array:
        least, beyond, number = carry
        return jnp.any((number > most) & (least + 1 < beyond))

    rows = x.shape[0]
    carry = (
        jnp.broadcast_to(jnp.asarray(limits.min if low is None else low, key), (rows,)),
        jnp.broadcast_to(jnp.asarray(limits.max if high is None else high, key), (rows,)),
        jnp.full(rows, jnp.inf, jnp.float32),
    )
    return lax.while_loop(unfinished, step, vary_like(carry, (x, carry)))[0]


def shrunk(running: Running, k: int, most: int) -> Running:
    """The K largest and a few more, at most `most`, in the order of their ids; the rest is room."""
    rows, size = running.keys.shape
    part = min(ROWS_AT_ONCE, rows)
    largest = jnp.max(running.keys, axis=1)
    least = kth_largest(running.keys, k, most, running.floor, largest + 1)
    larger = bit_words.packed(running.keys > least[:, None])
    equal = bit_words.packed(running.keys == least[:, None])
    words = barrier(larger | bit_words.leading(equal, most - bit_words.counts(larger)))

    def some(j: jax.Array, arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # From left to right, so that parts that overlap are no matter: they are moved once.
        start = jnp.minimum(j * part, rows - part)
        new = start + jnp.arange(part, dtype=jnp.int32) >= j * part
        part_words = lax.dynamic_slice_in_dim(words, start, part)
        at, there = barrier(bit_words.places(part_words, jnp.int32(0), most))

        def kept_of(x: jax.Array, empty: jax.Array | int) -> jax.Array:
            old = lax.dynamic_slice_in_dim(x, start, part)
            moved = jnp.take_along_axis(old, at, axis=1, mode="promise_in_bounds")
            moved = jnp.where(there, moved, empty)
            if rows % part:
                moved = jnp.where(new[:, None], moved, old[:, :most])
            return barrier(moved)

        least_key = key_of(-jnp.inf, jnp.float32)
        begin, behind = (start, jnp.int32(0)), (start, jnp.int32(most))
        empty_room = jnp.full((part, size - most), least_key)
        keys = lax.dynamic_update_slice(arrays[0], kept_of(arrays[0], least_key), begin)
        keys = lax.dynamic_update_slice(keys, empty_room, behind)
        return keys, lax.dynamic_update_slice(arrays[1], kept_of(arrays[1], 0), begin)

    keys, ids = lax.fori_loop(
        0, -(-rows // part), some, vary_like((running.keys, running.ids), running)
    )
    return Running(keys, ids, least, jnp.max(bit_words.counts(words)) - k)


def ordered(running: Running, k: int) -> BestColumns:
    """The top K."""
    running = shrunk(running, k, k)
    rows = running.keys.shape[0]
    part = min(ROWS_AT_ONCE, rows)
    column = jnp.arange(k, dtype=jnp.int32)

    def some(j: jax.Array, arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # In place: rows that two parts have are in order the second time, and stay so.
        start = jnp.minimum(j * part, rows - part)
        begin = (start, jnp.int32(0))
        keys: jax.Array
        ids: jax.Array
        keys, ids = (barrier(lax.dynamic_slice(x, begin, (part, k))) for x in arrays)

        def count(i: jax.Array, before: jax.Array) -> jax.Array:
            other = lax.dynamic_slice_in_dim(keys, i, 1, 1)
            first = (other > keys) | ((other == keys) & (i < column)[None])
            return before + first.astype(jnp.int32)

        before = lax.fori_loop(
            0, k, count, vary_like(jnp.zeros((part, k), jnp.int32), keys), unroll=min(UNROLL, k)
        )
        row = jnp.arange(part, dtype=jnp.int32)[:, None]

        def put(array: jax.Array, values: jax.Array) -> jax.Array:
            values = (
                jnp.zeros_like(values)
                .at[row, before]
                .set(values, mode="promise_in_bounds", unique_indices=True)
            )
            return lax.dynamic_update_slice(array, values, begin)

        return put(arrays[0], keys), put(arrays[1], ids)

    arrays = vary_like((running.keys, running.ids), running)
    keys, ids = lax.fori_loop(0, -(-rows // part), some, arrays)
    return BestColumns(floats(keys[:, :k], jnp.float32), ids[:, :k])


def merged(best: BestColumns, later: BestColumns, k: int) -> BestColumns:
    """The top K with [B, n] of a later part, in order too; not on a CPU."""
    values, at = top_k(jnp.concatenate([best.logits, later.logits], axis=1), k)
    ids = jnp.take_along_axis(jnp.concatenate([best.ids, later.ids], axis=1), at, axis=1)
    return BestColumns(values, ids)
