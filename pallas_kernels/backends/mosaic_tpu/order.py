"""The K largest candidates of a batch of rows, in order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_tpu.plan import LANES
from pallas_kernels.backends.mosaic_tpu.stacks import Stacks
from pallas_kernels.backends.mosaic_tpu.unit import tree

NO_ID = float(2**24)


def order(stacks: Stacks, hard: Any, values_ref: Any, ids_ref: Any) -> None:
    """K times the largest candidate of each row, ties lowest id first: [batch rows, width].

    hard [batch rows, 128] float32: more than 0 where a row's results are there already.
    """
    plan = stacks.plan
    used = [slot for slot in range(plan.slots) if slot % (plan.depth + 1) < plan.depth]
    lanes = lax.broadcasted_iota(jnp.int32, (plan.batch_rows, LANES), 1)
    easy = hard[...] == 0.0
    for slot in used:  # from here on ids, not columns
        stacks.columns[slot] = stacks.columns[slot] * float(LANES) + lanes.astype(jnp.float32)

    def take(rank: jax.Array, _: None) -> None:
        largest = tree(jnp.maximum, [stacks.logits[slot] for slot in used])
        largest = jnp.max(largest, axis=1, keepdims=True)
        equal = [
            jnp.where(stacks.logits[slot] == largest, stacks.columns[slot], NO_ID) for slot in used
        ]
        first = jnp.min(tree(jnp.minimum, equal), axis=1, keepdims=True)
        for slot, one in zip(used, equal, strict=True):
            stacks.logits[slot] = jnp.where(one == first, -jnp.inf, stacks.logits[slot])
        write(rank, largest + 0.0, first.astype(jnp.int32), easy, values_ref, ids_ref)

    lax.fori_loop(0, plan.k, take, None)


def write(
    rank: jax.Array,
    values: jax.Array,
    ids: jax.Array,
    rows: jax.Array,
    values_ref: Any,
    ids_ref: Any,
    at: Any = slice(None),
) -> None:
    """Write values and ids [n, 1] to column `rank` of the outputs' rows `at`, where `rows` says."""
    block = pl.ds(pl.multiple_of(rank & -LANES, LANES), LANES)
    lanes = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    here = (lanes == (rank & (LANES - 1))) & rows
    values_ref[at, block] = jnp.where(here, values, values_ref[at, block])
    ids_ref[at, block] = jnp.where(here, ids, ids_ref[at, block])
