"""Reductions of rows by pieces: the form that XLA's CPU compiler makes vector code of.

Of a plain reduction over a row it makes windows, or a loop that writes every term and another that
adds them, in an order that depends on the number of rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def pieces(x: jax.Array, number: int, padding: float) -> list[jax.Array]:
    """x [B, n] cut into `number` pieces [B, ceil(n / number)]; the last ones are padded."""
    width = -(-x.shape[1] // number)
    cut = [x[:, i * width : (i + 1) * width] for i in range(number)]
    return [
        jnp.pad(piece, ((0, 0), (0, width - piece.shape[1])), constant_values=padding)
        if piece.shape[1] < width
        else piece
        for piece in cut
    ]


def at_place(place: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The entries at one place [B] of each row of arrays [B, n, ...] of 32-bit numbers; else 0.

    One loop for all arrays, where XLA's CPU compiler makes two kernels of each gather.
    """
    wide = [x if x.dtype.itemsize == 4 else x.astype(jnp.int32) for x in arrays]
    bits = [lax.bitcast_convert_type(x, jnp.int32) for x in wide]
    here = jnp.arange(arrays[0].shape[1], dtype=jnp.int32)[None] == place[:, None]
    masked = [jnp.where(here.reshape(here.shape + (1,) * (x.ndim - 2)), x, 0) for x in bits]
    found = summed(*masked)
    return tuple(lax.bitcast_convert_type(one, x.dtype) for one, x in zip(found, wide, strict=True))


def summed(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The sums [B, ...] of integers [B, n, ...] over their second axis, in one loop."""
    zeros = tuple(np.zeros((), x.dtype) for x in arrays)
    return tuple(lax.reduce(arrays, zeros, lambda a, b: tuple(map(lax.add, a, b)), (1,)))


def largest_and_first(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest value of each row [B, n], and the lowest id that has it; in one loop.

    XLA's CPU compiler makes three or four kernels of a reduction of one array.
    """

    def better(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return tuple(jnp.where(first, x, y) for x, y in zip(a, b, strict=True))

    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    least = np.asarray(-np.inf if is_float else np.iinfo(values.dtype).min, values.dtype)
    start = least, np.int32(2**31 - 1)
    value, id = lax.reduce((values, ids), start, better, (1,))
    return value, id


def in_pairs(
    join: Callable[[jax.Array, jax.Array], jax.Array], parts: list[jax.Array]
) -> jax.Array:
    """2**n arrays joined to one, two at a time."""
    while len(parts) > 1:
        parts = [join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def reduced(
    join: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, number: int, padding: float
) -> jax.Array:
    """Each row of x [B, n] joined to one value [B], `number` (2**n) pieces at a time."""
    while x.shape[1] > 1:
        x = lax.optimization_barrier(x)  # type: ignore[no-untyped-call]
        x = in_pairs(join, pieces(x, number, padding))
    return x[:, 0]
