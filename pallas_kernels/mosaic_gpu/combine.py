"""Step 1 of pass 2: combine the results of the programs that read a row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.tiling import WARPGROUP, Tiling


def is_valid(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Whether a row has a finite logit and neither a NaN nor a +inf; its sum is then at least 1."""
    return (maximum > -jnp.inf) & (maximum < jnp.inf) & (total > 0)


def combine(
    partials_ref: Any,  # [PARTS * R * programs] f32
    tiling: Tiling,
    num_targets: int,
    target: Any,
    scale: jax.Array,
    counted: bool,
    interpreted: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A row's maximum and sum of exponentials, float32, and its count of larger logits, int32."""

    def load(part: int) -> list[tuple[jax.Array, jax.Array]]:
        """The numbers of all programs, a warpgroup at a time, and which of its threads have one."""
        begin = (part * num_targets + target) * tiling.programs
        found = []
        for offset in range(0, tiling.programs, WARPGROUP):
            x = compat.load_vector(partials_ref, begin + offset, WARPGROUP, interpreted)
            found.append((x, compat.vector_iota(WARPGROUP) < tiling.programs - offset))
        return found

    maxima, sums = load(0), load(1)
    lowest = [jnp.where(mine, x, jnp.float32(-jnp.inf)) for x, mine in maxima]
    maximum = jnp.max(functools.reduce(jnp.maximum, lowest))
    terms = []
    for (x, mine), (total, _) in zip(maxima, sums, strict=True):
        term = total * jnp.exp2((x - maximum) * scale)
        # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
        terms.append(jnp.where(mine & (x != -jnp.inf), term, jnp.float32(0)))
    total = jnp.sum(functools.reduce(jnp.add, terms))
    if not counted:
        return maximum, total, jnp.int32(0)
    found = [jnp.where(mine, x, jnp.float32(0)) for x, mine in load(2)]
    return maximum, total, jnp.sum(functools.reduce(jnp.add, found)).astype(jnp.int32)
