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

_Values = TypeVar("_Values", bound=Tree)
_Joined = TypeVar("_Joined")


def pieces(x: jax.Array, number: int, padding: float) -> list[jax.Array]:
    """x [B, n] cut into `number` pieces [B, ceil(n / number)]; the last ones are padded in front.

    A loop reads what is there and drops it, which XLA's CPU compiler makes four times as fast as
    padding.
    """
    size = x.shape[1]
    width = -(-size // number)
    column = np.arange(width, dtype=np.int32)
    cut = []
    for start in range(0, number * width, width):
        first = min(start, size - width)
        piece = x[:, first : first + width]
        is_new = column >= start - first
        cut.append(
            piece if is_new.all() else jnp.where(is_new, piece, jnp.asarray(padding, x.dtype))
        )
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


_COUNTED = 4  # pieces of a row, side by side


def number_where(test: Callable[[jax.Array], jax.Array], x: jax.Array, padding: float) -> jax.Array:
    """How many numbers of each row of x [B, n] pass a test, which `padding` does not: [B] int32.

    One loop: XLA's CPU compiler makes windows of a sum of one array, and several kernels of those.
    """
    flags = (test(piece).astype(jnp.int32) for piece in pieces(x, _COUNTED, padding))
    return in_pairs(jnp.add, list(summed(*flags)))


def largest_and_first(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest value of each row [..., n], and the lowest id that has it; in one loop.

    XLA's CPU compiler makes three or four kernels of a reduction of one array.
    """

    def better(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return tuple(jnp.where(first, x, y) for x, y in zip(a, b, strict=True))

    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    least = np.asarray(-np.inf if is_float else np.iinfo(values.dtype).min, values.dtype)
    start = least, np.int32(2**31 - 1)
    value, id = lax.reduce((values, ids), start, better, (values.ndim - 1,))
    return value, id


def in_pairs(join: Callable[[_Joined, _Joined], _Joined], parts: list[_Joined]) -> _Joined:
    """The parts joined to one, two at a time."""
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]
