"""Tiles of rows: a row's values have the same bits, however many rows are computed beside it.

A product of another number of rows may add in another order. Where all are of tiles of one shape,
a row has bits of its own, whatever batch, chunk or sequence it stands in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jax_specdec.device.model.arithmetic import matmul, rms_norm

KEY_TILE = 256  # cache entries that a softmax takes in at a time


Tile = int | tuple[int, int] | None
_Result = TypeVar("_Result")  # a tree of arrays


def over_rows(function: Callable[..., _Result], *rows: Any, tile: Tile, axes: int = 2) -> _Result:
    """`function(*rows)` of rows that do not depend on one another, tile by tile.

    Args:
      function: of arrays [1, tile, ...]; returns a tree of arrays [1, tile, ...].
      rows: trees of arrays with the same leading axes.
      tile: rows that are computed at once, always in one shape. Of a pair (tile, step), fewer rows
        than a tile are padded to a multiple of the step, where shapes between the two have the same
        bits: on CPUs, from 8 to 32. None: all rows, as they are.
      axes: how many axes lead.

    Returns:
      What `function` returns, with the leading axes of the rows.
    """
    if tile is None:
        return function(*rows)
    lead = jax.tree.leaves(rows)[0].shape[:axes]
    most, step = tile if isinstance(tile, tuple) else (tile, tile)
    size = min(most, -(-math.prod(lead) // step) * step)

    def isolated(tile_inputs: tuple[Any, ...]) -> Any:
        # Fused with what stands before or behind it, a tile would round at other places.
        return lax.optimization_barrier(function(*lax.optimization_barrier(tile_inputs)))

    def split(x: jax.Array) -> jax.Array:
        return as_tiles(x.reshape(1, -1, *x.shape[axes:]), size)

    def joined(x: jax.Array) -> jax.Array:
        return of_tiles(x, 1, math.prod(lead)).reshape(*lead, *x.shape[3:])

    results: _Result = jax.tree.map(joined, lax.map(isolated, jax.tree.map(split, rows)))
    return results


def as_tiles(x: Shaped[Array, "B S *of"], tile: int) -> Shaped[Array, "N 1 tile *of"]:
    """The rows of each slot in tiles of its own; padding repeats them."""
    count = x.shape[1]
    if rest := -count % tile:
        times = -(-(count + rest) // count)
        x = jnp.tile(x, (1, times, *[1] * (x.ndim - 2)))[:, : count + rest]
    return x.reshape(-1, 1, tile, *x.shape[2:])


def of_tiles(x: Shaped[Array, "N 1 tile *of"], slots: int, count: int) -> Shaped[Array, "B S *of"]:
    """The first `count` rows of each of so many slots; the inverse of `as_tiles`."""
    return x.reshape(slots, -1, *x.shape[3:])[:, :count]


def whole_tiles(length: int) -> int:
    """The entries of a slot that holds so many, in whole tiles of keys."""
    return -(-length // KEY_TILE) * KEY_TILE


def tiled_product(
    x: Float[Array, "*rows N"],
    w: Float[Array, "N M"],
    bias: Float[Array, " M"] | None = None,
    *,
    tile: Tile,
) -> Float[Array, "*rows M"]:
    """x @ w (+ bias), accumulated in float32; see `over_rows`."""
    axes = x.ndim - 1
    return over_rows(lambda x: matmul(x, w, bias), x, tile=tile, axes=axes)


def tiled_norm(
    x: Float[Array, "*rows N"], weight: Float[Array, " N"], eps: float, *, tile: Tile
) -> Float[Array, "*rows N"]:
    """RMSNorm, in float32; see `over_rows`."""
    axes = x.ndim - 1

    def normed(x: jax.Array) -> jax.Array:
        return rms_norm(x, weight, eps, in_one_order=tile is not None)

    return over_rows(normed, x, tile=tile, axes=axes)
