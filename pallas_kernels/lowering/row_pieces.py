"""Reductions of rows by pieces, of which XLA's CPU compiler makes vector code.

Of a plain reduction over a row it makes windows, or a loop that writes every term and another that
adds them, in an order that depends on the number of rows.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.lowering.forms import Tree
from pallas_kernels.lowering.platforms import lowered_for

_Values = TypeVar("_Values", bound=Tree)
_Joined = TypeVar("_Joined")


def pieces(x: jax.Array, number: int, padding: float) -> list[jax.Array]:
    """x [B, n] cut into `number` pieces [B, ceil(n / number)]; the last ones are padded in front.

    A loop reads what is there and drops it, which XLA's CPU compiler makes four times as fast as
    padding.
    """
    size = x.shape[1]
    width = -(-size // number)
    missing = jnp.asarray(padding, x.dtype)
    cut = []
    for start in range(0, number * width, width):
        first = min(start, size - width)
        piece = x[:, first : first + width]
        if first < start:  # an iota, since a mask would be a constant that a program has to take
            piece = jnp.where(lax.iota(jnp.int32, width) >= start - first, piece, missing)
        cut.append(piece)
    return cut


def filled(x: jax.Array, width: int, value: float | jax.Array) -> jax.Array:
    """x [B, n] with `value` behind each row, up to this width."""
    missing = width - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing)), constant_values=value) if missing else x


def at_place(place: jax.Array, values: _Values) -> _Values:
    """The entries at one place [B] of each row of a tree of arrays [B, n, ...]; else 0.

    Of numbers of 32 bits, and truth values. One loop for all arrays, where XLA's CPU compiler makes
    two kernels of each gather.
    """
    arrays, tree = jax.tree.flatten(values)
    wide = [x if x.dtype.itemsize == 4 else x.astype(jnp.int32) for x in arrays]
    is_place = jnp.arange(arrays[0].shape[1], dtype=jnp.int32)[None] == place[:, None]
    is_place = is_place.reshape(is_place.shape + (1,) * (arrays[0].ndim - 2))
    words = summed(*(jnp.where(is_place, lax.bitcast_convert_type(x, jnp.int32), 0) for x in wide))
    entries = (
        lax.bitcast_convert_type(word, x.dtype).astype(array.dtype)
        for word, x, array in zip(words, wide, arrays, strict=True)
    )
    result: _Values = jax.tree.unflatten(tree, entries)
    return result


def summed(*arrays: jax.Array, axis: int = 1) -> tuple[jax.Array, ...]:
    """The sums [B, ...] of integers [B, n, ...] over their second axis, or another, in one loop."""
    zeros = tuple(np.zeros((), x.dtype) for x in arrays)
    return tuple(lax.reduce(arrays, zeros, lambda a, b: tuple(map(lax.add, a, b)), (axis,)))


_SIDE_BY_SIDE = 4  # pieces of a row


def number_where(test: Callable[[jax.Array], jax.Array], x: jax.Array, padding: float) -> jax.Array:
    """How many floats of each row of x [B, n] pass a test, which `padding` does not: [B] int32.

    One loop: XLA's CPU compiler makes windows of a sum of one array, and several kernels of those.
    It is cut as integers, since pieces of bfloat16 would be widened and rounded again.
    """
    as_integer = f"int{8 * x.dtype.itemsize}"
    bits = lax.bitcast_convert_type(x, as_integer)
    padding_bits = int(np.asarray(padding, x.dtype).view(as_integer))
    cut = pieces(bits, _SIDE_BY_SIDE, padding_bits)
    flags = [test(lax.bitcast_convert_type(piece, x.dtype)).astype(jnp.int32) for piece in cut]
    return in_pairs(jnp.add, list(summed(*flags)))


def largest_key(keys: jax.Array) -> jax.Array:
    """The largest of the integers of each row of keys [B, n]: [B]."""
    return _extreme(lax.max, keys, np.iinfo(keys.dtype).min)


def largest_key_and_id(keys: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of the integers `keys` [B, n] of each row, and the lowest id that has it."""
    return lowered_for(
        keys,
        ids,
        like=lambda keys, ids: (keys[:, 0], ids[:, 0]),
        cpu=_in_two_loops,
        default=_in_one_loop,
    )


def _in_two_loops(keys: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loops that compare numbers, of which XLA's CPU compiler makes vector code.

    Of one that carries a pair it makes none, and takes twenty times as long.
    """
    top, most = largest_key(keys), np.iinfo(ids.dtype).max
    return top, _extreme(lax.min, jnp.where(keys == top[:, None], ids, most), most)


def _in_one_loop(keys: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One launch of a GPU."""

    def better(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return tuple(jnp.where(first, x, y) for x, y in zip(a, b, strict=True))

    start = np.asarray(np.iinfo(keys.dtype).min, keys.dtype), np.iinfo(ids.dtype).max
    key, id = lax.reduce((keys, ids), start, better, (1,))
    return key, id


def _extreme(
    join: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, start: int
) -> jax.Array:
    """All numbers of each row of integers x [B, n], joined; in one loop, as `number_where`."""
    cut = pieces(x, min(_SIDE_BY_SIDE, x.shape[1]), start)
    starts = (np.asarray(start, x.dtype),) * len(cut)
    joined: list[jax.Array] = list(
        lax.reduce(tuple(cut), starts, lambda a, b: tuple(map(join, a, b)), (1,))
    )
    return in_pairs(join, joined)


def in_pairs(join: Callable[[_Joined, _Joined], _Joined], parts: list[_Joined]) -> _Joined:
    """The parts joined to one, two at a time."""
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]
