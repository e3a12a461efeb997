"""The running top K of rows whose logits come a part at a time.

The K largest so far, and behind them room for candidates: logits of later parts that are larger
than the K-th largest was when room was last made. A part has the fewer of them the later it comes,
so most parts append a few and order nothing else. Equal logits need no care: those of a later part
have larger ids and come later here too, and `top_k` keeps the order of what it is given.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ordered_keys import ordered_keys, strictly_larger
from pallas_kernels.selection import NARROWEST_GROUP, slices, top_k

SIZES = (8, 16, 64)  # numbers of candidates that a part's rows may append, at most
GROUPS = 6  # of a part, in which a row may have so many as the first size
LEAST_ROOM = 64


class Running(NamedTuple):
    """The candidates of B rows, for K and room for E more: the first K are ordered."""

    logits: jax.Array  # [B, K + E] float32, -inf where there is none
    ids: jax.Array  # [B, K + E] int32


def room(k: int, width: int) -> int:
    """E, for V = `width`; 0 where K is too large a part of it for more memory."""
    return max(LEAST_ROOM, k // 2) if k and width >= 200 * k else 0


def empty(rows: int, k: int, room: int) -> Running:
    """Nothing yet, for `rows` rows."""
    shape = (rows, k + room)
    return Running(jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32))


def ordered(running: Running, k: int) -> Running:
    """The top K alone, [B, K]."""
    if k == running.ids.shape[1]:
        return running
    values, at = top_k(running.logits, k)
    return Running(values, jnp.take_along_axis(running.ids, at, axis=1))


def merged(running: Running, logits: jax.Array, ids: jax.Array, k: int) -> Running:
    """The top K with logits and ids [B, n] that come after those found: of a later part."""
    both = Running(
        jnp.concatenate([running.logits, logits], axis=1),
        jnp.concatenate([running.ids, ids], axis=1),
    )
    return ordered(both, k)


def with_room(running: Running, k: int) -> Running:
    """The top K, and all of the room empty."""
    return _with_free(ordered(running, k), running.ids.shape[1] - k)


def _with_free(best: Running, free: int) -> Running:
    return Running(
        jnp.pad(best.logits, ((0, 0), (0, free)), constant_values=-jnp.inf),
        jnp.pad(best.ids, ((0, 0), (0, free))),
    )


def appended(
    running: Running, used: jax.Array, x: jax.Array, maxima: jax.Array, first: jax.Array, k: int
) -> tuple[Running, jax.Array]:
    """The candidates with those of a part too, and how much of the room is used.

    Args:
      running: what was found before.
      used: [] int32, the candidates in the room.
      x: [B, W] logits of the part.
      maxima: the `group_maxima` of x, of groups of `NARROWEST_GROUP`.
      first: [] int32, the id of the part's first column.
      k: K.
    """
    width = x.shape[1]
    floor = running.logits[:, k - 1].astype(x.dtype)
    live = maxima > ordered_keys(floor)[:, None]
    # Counted in float32, exact below 2**24: on a CPU several times faster than in int32.
    most = jnp.max(jnp.sum(live.astype(jnp.float32), axis=1)).astype(jnp.int32)
    free = running.ids.shape[1] - k
    sizes = [size for size in SIZES if size <= free and size < min(k, width)]

    def few(size: int) -> tuple[Running, jax.Array]:
        groups = min(size * GROUPS // SIZES[0], maxima.shape[1])
        places = first_true(live, groups)
        found = in_groups(x, places, floor)
        above = found > -jnp.inf
        number = jnp.max(jnp.sum(above.astype(jnp.float32), axis=1)).astype(jnp.int32)

        def fits() -> tuple[Running, jax.Array]:
            before, start = lax.cond(
                used + size > free,
                lambda: (with_room(running, k), jnp.zeros_like(used)),
                lambda: (running, used),
            )
            at = first_true(above, size)
            values = jnp.take_along_axis(found, at, axis=1, mode="fill", fill_value=-jnp.inf)
            group = jnp.take_along_axis(places, at // NARROWEST_GROUP, axis=1, mode="clip")
            ids = group * NARROWEST_GROUP + at % NARROWEST_GROUP + first
            here = (jnp.int32(0), k + start)
            return Running(
                lax.dynamic_update_slice(before.logits, values, here),
                lax.dynamic_update_slice(before.ids, ids, here),
            ), start + number

        found_now: tuple[Running, jax.Array] = lax.cond(number <= size, fits, many)
        return found_now

    def many() -> tuple[Running, jax.Array]:
        above = strictly_larger(x, floor[:, None])
        kept = jnp.where(above, x.astype(jnp.float32), -jnp.inf)
        values, places = top_k(kept, min(k, width))
        best = merged(running, values, places + first, k)
        return _with_free(best, free), jnp.zeros_like(used)

    def nothing() -> tuple[Running, jax.Array]:
        return running, used

    which = (most > 0).astype(jnp.int32)
    which += sum((most > size * GROUPS // SIZES[0]).astype(jnp.int32) for size in sizes)
    branches = [nothing, *(lambda size=size: few(size) for size in sizes), many]
    found: tuple[Running, jax.Array] = lax.switch(which, branches)
    return found


def in_groups(x: jax.Array, groups: jax.Array, floor: jax.Array) -> jax.Array:
    """The logits of x [B, W] above `floor` [B] in groups [B, C], else -inf: [B, C * width] float32.

    A group outside of x has none.
    """
    width = NARROWEST_GROUP
    inside = groups * width < x.shape[1]
    found = slices(x, jnp.where(inside, groups * width, 0), width)
    above = strictly_larger(found, floor[:, None, None]) & inside[:, :, None]
    found = jnp.where(above, found.astype(jnp.float32), -jnp.inf)
    return found.reshape(x.shape[0], groups.shape[1] * width)


def first_true(flags: jax.Array, count: int) -> jax.Array:
    """The first `count` true entries of each row of flags [B, n]: [B, count] int32, else 32 * n.

    By words of 32 flags, of which the lowest bit is taken out again and again: a few operations on
    short vectors, where `top_k` would order all of them.
    """
    rows, n = flags.shape
    words = -(-n // 32)
    padded = jnp.pad(flags, ((0, 0), (0, 32 * words - n))).reshape(rows, words, 32)
    bits = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    left = jnp.sum(jnp.where(padded, bits, jnp.uint32(0)), axis=2, dtype=jnp.uint32)
    index = jnp.arange(words, dtype=jnp.int32)[None]
    places = []
    for _ in range(count):
        # Of each word the first bit; of these the first one.
        bit = jax.lax.population_count((left & -left) - 1).astype(jnp.int32)
        own = jnp.where(left > 0, 32 * index + bit, jnp.int32(32 * n))
        place = jnp.min(own, axis=1)
        places.append(place)
        left = jnp.where(own == place[:, None], left & (left - 1), left)
    return jnp.stack(places, axis=1)
