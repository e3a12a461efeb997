"""The top K of rows that have too many candidates for the stacks: K sweeps over the rows in VMEM.

Rows of equal logits take it, and rows whose K-th largest logit is near 0: logits are compared as
integers here, which keeps subnormal numbers apart.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.mosaic_tpu.order import NO_ID, write
from pallas_kernels.backends.mosaic_tpu.plan import LANES, SUBLANES
from pallas_kernels.backends.mosaic_tpu.unit import SHAPE, Halves, Unit

LEAST = -(1 << 31)
INFINITY = 0x7F800000  # as bits; minus it is the key of -inf
HALF = 16  # bits, of which float32 holds every number


def scan(unit: Unit, half: int, values_ref: Any, ids_ref: Any) -> None:
    """Writes the top K of half a unit."""
    given = unit.given()
    lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
    all_rows = jnp.full(SHAPE, True)

    def take(rank: jax.Array, last: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        last_key, last_id = (jnp.broadcast_to(one, SHAPE) for one in last)

        def step(loaded: list[Halves], start: Any, carry: Any) -> Any:
            best, best_id = carry
            for i, one in enumerate(loaded):
                key = _mirrored(lax.bitcast_convert_type(one[half], jnp.int32))
                token = (start + i) * LANES + lanes
                later = (key < last_key) | ((key == last_key) & (token > last_id))
                better = later & (key > best)
                best = jnp.where(better, key, best)
                best_id = jnp.where(better, token, best_id)
            return best, best_id

        def chunk(index: Any, tokens: int, carry: Any) -> Any:
            return unit.over_columns(index, tokens, given, step, carry)

        nothing = jnp.full(SHAPE, -INFINITY, jnp.int32), jnp.zeros(SHAPE, jnp.int32)
        best, best_id = unit.over_chunks(chunk, nothing)
        # Reductions over lanes are those of floats.
        upper = (best >> HALF).astype(jnp.float32)
        lower = (best & 0xFFFF).astype(jnp.float32)
        first = jnp.max(upper, axis=1, keepdims=True)
        second = jnp.max(jnp.where(upper == first, lower, -1.0), axis=1, keepdims=True)
        is_best = (upper == first) & (lower == second)
        token = jnp.where(is_best, best_id.astype(jnp.float32), NO_ID)
        found = jnp.min(token, axis=1, keepdims=True).astype(jnp.int32)
        key = (first.astype(jnp.int32) << HALF) | second.astype(jnp.int32)
        value = lax.bitcast_convert_type(_mirrored(key), jnp.float32)
        write(rank, value, found, all_rows, values_ref, ids_ref, unit.rows(half))
        return key, found

    before = jnp.full((SUBLANES, 1), -LEAST - 1, jnp.int32), jnp.zeros((SUBLANES, 1), jnp.int32)
    lax.fori_loop(0, unit.plan.k, take, before)


def _mirrored(bits: jax.Array) -> jax.Array:
    """Floats' bits as integers in their order, and back: `ordered_keys` has the same."""
    return jnp.where(bits < 0, jnp.int32(LEAST) - bits, bits)
