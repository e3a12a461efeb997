"""Reductions of rows by pieces: the form that XLA's CPU compiler makes vector code of.

Of a plain reduction over a row it makes windows, or a loop that writes every term and another that
adds them, in an order that depends on the number of rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
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
