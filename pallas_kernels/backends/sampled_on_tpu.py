"""Candidates of rows that are sampled, on a TPU: the kernel's, where XLA would sort whole rows."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import choose
from pallas_kernels.backends.mosaic_tpu.plan import DoesNotFit
from pallas_kernels.backends.xla import selection
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.lowering.tpu_rule import kernel_is_faster

FEW = 64
Found = tuple[jax.Array, jax.Array]  # ids [R, k] int32, logits [R, k] float32


def largest(
    logits: jax.Array,
    k: int,
    row_ids: jax.Array | None = None,
    num_rows: jax.Array | None = None,
) -> Found:
    """The k largest logits of rows of [N, V], as `selection.select_top_k` returns them.

    Without `row_ids` of all rows; else of these, from `num_rows` on anything. In a batch of `vmap`
    and where the kernel cannot run or is slower, XLA selects.
    """
    count = len(logits) if row_ids is None else len(row_ids)
    obstacle = choose.tpu_obstacle(logits)
    # More candidates than the stacks hold take K sweeps in VMEM: XLA would sort the rows for them.
    dtype, few = logits.dtype.name, min(k, FEW)
    if obstacle or not k or not kernel_is_faster(count, logits.shape[1], few, dtype):
        return _by_xla(k, logits, row_ids)

    @jax.custom_batching.custom_vmap
    def kernel(logits: jax.Array, row_ids: jax.Array | None, num_rows: jax.Array | None) -> Found:
        from pallas_kernels.backends.mosaic_tpu import rows

        nothing = jnp.full(count, jnp.inf, jnp.float32)  # no logit is larger: nothing to count
        try:
            found = rows.row_parts(logits, nothing, Wanted(k), row_ids, num_rows, None)
        except DoesNotFit:
            return _by_xla(k, logits, row_ids)
        there = found.top_logits > -jnp.inf
        return jnp.where(there, found.top_ids, jnp.int32(-1)), found.top_logits

    @kernel.def_vmap
    def _(_: int, is_batched: Any, *arguments: Any) -> tuple[Found, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)

        def one(logits: jax.Array, row_ids: jax.Array | None, _: jax.Array | None) -> Found:
            return _by_xla(k, logits, row_ids)

        return jax.vmap(one, in_axes=tuple(axes))(*arguments), (True, True)

    found: Found = kernel(logits, row_ids, num_rows)
    return found


def _by_xla(k: int, logits: jax.Array, row_ids: jax.Array | None) -> Found:
    x = logits if row_ids is None else logits.at[row_ids].get(mode="clip")
    return selection.select_top_k(x, None, k, None, selection.from_groups)
