"""Step 1 of pass 2: combine the results of the programs that read a row."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backends.mosaic_gpu import compat
from pallas_kernels.backends.mosaic_gpu.early import load_at_once
from pallas_kernels.backends.mosaic_gpu.pass1_rows import LEAST
from pallas_kernels.backends.mosaic_gpu.tiling import Tiling

FEW = 2  # programs: every thread combines their results by itself
WARP = 32


def is_valid(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Whether a row has a finite logit and neither a NaN nor a +inf; its sum is then at least 1."""
    return (maximum > -jnp.inf) & (maximum < jnp.inf) & (total > 0)


class Loaded(NamedTuple):
    """Of all programs that read a row, one by one or a warp of them at a time."""

    maxima: list[jax.Array]
    sums: list[jax.Array]
    counts: list[jax.Array] | None  # if counted
    weighted: list[jax.Array] | None  # for the entropy


class Combined(NamedTuple):
    """A row's numbers."""

    maximum: jax.Array  # float32
    total: jax.Array  # float32: the sum of exponentials
    num_larger: jax.Array  # int32
    weighted: jax.Array | None  # float32: the sum of s exp(s), s = (x - maximum) / T


def load_partials(
    partials_ref: Any,  # [parts * R * programs] f32
    tiling: Tiling,
    num_targets: int,
    target: Any,
    counted: bool,
    entropy: bool,
    interpreted: bool,
) -> Loaded:
    """The results of the programs that read a row: one by one, or a warp of them at a time."""

    def load(part: int) -> list[jax.Array]:
        begin = (part * num_targets + target) * tiling.programs
        if tiling.programs <= FEW:
            places = range(tiling.programs)
            return [load_at_once(partials_ref, begin + i, interpreted) for i in places]
        offsets = range(0, tiling.programs, WARP)
        return [compat.load_warp(partials_ref, begin + i, WARP, interpreted) for i in offsets]

    return Loaded(load(0), load(1), load(2) if counted else None, load(3) if entropy else None)


def combine(loaded: Loaded, tiling: Tiling, scale: jax.Array) -> Combined:
    """A row's numbers. Every warp does it, so that no thread waits for another warp."""
    programs = tiling.programs

    def masked(values: list[jax.Array], nothing: float) -> list[jax.Array]:
        """`nothing` where a vector goes beyond the last program."""
        if programs <= FEW:
            return values
        return [
            x
            if programs - i * WARP >= WARP
            else jnp.where(compat.warp_iota(WARP) < programs - i * WARP, x, jnp.float32(nothing))
            for i, x in enumerate(values)
        ]

    def over_lanes(reduce: Any, value: jax.Array) -> jax.Array:
        return value if programs <= FEW else reduce(value)

    maxima, sums, counts, weighted = loaded
    lowest = functools.reduce(jnp.maximum, masked(maxima, -jnp.inf))
    maximum = over_lanes(jnp.max, lowest)
    terms, by_exponent = [], []
    for i, (x, total) in enumerate(zip(maxima, sums, strict=True)):
        moved = (x - maximum) * scale
        rescale = jnp.exp2(moved)
        # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
        terms.append(jnp.where(x != -jnp.inf, total * rescale, jnp.float32(0)))
        if weighted is not None:
            moved = jnp.maximum(moved, jnp.float32(LEAST))
            term = (weighted[i] + moved * total) * rescale
            by_exponent.append(jnp.where(x != -jnp.inf, term, jnp.float32(0)))
    total = over_lanes(jnp.sum, functools.reduce(jnp.add, masked(terms, 0)))
    count = jnp.int32(0)
    if counts is not None:
        count = over_lanes(jnp.sum, functools.reduce(jnp.add, masked(counts, 0)))
        count = count.astype(jnp.int32)
    if weighted is None:
        return Combined(maximum, total, count, None)
    summed = over_lanes(jnp.sum, functools.reduce(jnp.add, masked(by_exponent, 0)))
    return Combined(maximum, total, count, summed * jnp.float32(math.log(2)))
