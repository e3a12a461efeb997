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

from pallas_kernels.ordered_keys import floats, key_of, ordered_keys, strictly_larger
from pallas_kernels.selection import NARROWEST_GROUP, slices, top_k

SIZES = (8, 16, 64)  # numbers of candidates that a part's rows may append, at most
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
    floor = running.logits[:, k - 1]
    live = strictly_larger(x, floor[:, None].astype(x.dtype))
    # Counted in float32, exact below 2**24: on a CPU several times faster than in int32.
    most = jnp.max(jnp.sum(live.astype(jnp.float32), axis=1)).astype(jnp.int32)
    free = running.ids.shape[1] - k
    sizes = [size for size in SIZES if size <= free and size < min(k, width)]

    def few(size: int) -> tuple[Running, jax.Array]:
        before, start = lax.cond(
            used + size > free,
            lambda: (with_room(running, k), jnp.zeros_like(used)),
            lambda: (running, used),
        )
        values, places = from_groups(x, maxima, floor, size)
        here = (jnp.int32(0), k + start)
        return Running(
            lax.dynamic_update_slice(before.logits, values, here),
            lax.dynamic_update_slice(before.ids, places + first, here),
        ), start + size

    def many() -> tuple[Running, jax.Array]:
        values, places = top_k(jnp.where(live, x.astype(jnp.float32), -jnp.inf), min(k, width))
        best = merged(running, values, places + first, k)
        return _with_free(best, free), jnp.zeros_like(used)

    def nothing() -> tuple[Running, jax.Array]:
        return running, used

    which = (most > 0).astype(jnp.int32)
    which += sum((most > size).astype(jnp.int32) for size in sizes)
    branches = [nothing, *(lambda size=size: few(size) for size in sizes), many]
    found: tuple[Running, jax.Array] = lax.switch(which, branches)
    return found


def from_groups(
    x: jax.Array, maxima: jax.Array, floor: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """The logits of x [B, W] above `floor` [B], at most `size`, and their columns: [B, size] each.

    In the order of the columns' groups; -inf where there are fewer.
    """
    width = NARROWEST_GROUP
    above = ordered_keys(floor.astype(x.dtype))[:, None]
    live = jnp.where(maxima > above, maxima, key_of(-jnp.inf, x.dtype))
    count = min(size, maxima.shape[1])
    _, groups = top_k(floats(live, x.dtype).astype(jnp.float32), count)
    starts = jnp.sort(groups, axis=1) * width
    found = slices(x, starts, width).astype(jnp.float32)
    found = jnp.where(found > floor[:, None, None], found, -jnp.inf)
    found = found.reshape(x.shape[0], count * width)
    values, places = top_k(found, size)
    return values, jnp.take_along_axis(starts, places // width, axis=1) + places % width
