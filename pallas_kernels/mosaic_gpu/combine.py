"""Step 1 of pass 2: combine the results of the programs that read a row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.early import load_at_once
from pallas_kernels.mosaic_gpu.tiling import Tiling

FEW = 2  # programs: every thread combines their results by itself
WARP = 32


def is_valid(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Whether a row has a finite logit and neither a NaN nor a +inf; its sum is then at least 1."""
    return (maximum > -jnp.inf) & (maximum < jnp.inf) & (total > 0)


Loaded = list[list[jax.Array]]  # maxima, sums and, if counted, counts: of all programs


def load_partials(
    partials_ref: Any,  # [PARTS * R * programs] f32
    tiling: Tiling,
    num_targets: int,
    target: Any,
    counted: bool,
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

    return [load(part) for part in range(3 if counted else 2)]


def combine(
    loaded: Loaded, tiling: Tiling, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A row's maximum and sum of exponentials, float32, and its count of larger logits, int32.

    Every warp does it, so that no thread waits for another warp.
    """
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

    maxima, sums, *counts = loaded
    lowest = functools.reduce(jnp.maximum, masked(maxima, -jnp.inf))
    maximum = over_lanes(jnp.max, lowest)
    terms = []
    for x, total in zip(maxima, sums, strict=True):
        term = total * jnp.exp2((x - maximum) * scale)
        # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
        terms.append(jnp.where(x != -jnp.inf, term, jnp.float32(0)))
    total = over_lanes(jnp.sum, functools.reduce(jnp.add, masked(terms, 0)))
    if not counts:
        return maximum, total, jnp.int32(0)
    count = over_lanes(jnp.sum, functools.reduce(jnp.add, masked(counts[0], 0)))
    return maximum, total, count.astype(jnp.int32)
