"""Copies of a unit's rows from HBM to VMEM: asynchronous, a chunk of columns each.

What HBM holds is padded to tiles, and a copy of compiled code takes whole tiles. The interpreter
knows the logits alone, without padding: there a copy ends where they do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_tpu.plan import LANES, SUBLANES, Plan


class Copies(NamedTuple):
    """The copies of all units; unit u goes to buffer u % 2."""

    plan: Plan
    logits_ref: Any  # [N, V] in HBM
    rows_ref: Any  # [R] int32 in SMEM, where rows are gathered
    buffer: Any  # [2, or 1 of blocks, rows, V rounded up] in VMEM
    semaphores: Any  # [2, chunks]; None for blocks

    def start(self, unit: Any) -> None:
        """Start the copies of all chunks of a unit."""
        self._chunks(lambda index, tokens: self._each(unit, index, tokens, lambda c: c.start()))

    def wait(self, unit: Any, index: Any, tokens: int) -> None:
        """Wait for a chunk of a unit. Pallas has waited for a block."""
        if self.plan.as_blocks:
            return
        self._each(unit, index, tokens, lambda c: c.wait())

    def _chunks(self, do: Callable[[Any, int], None]) -> None:
        plan = self.plan
        last = plan.num_chunks - 1

        def full(index: jax.Array, _: None) -> None:
            do(index, plan.chunk * LANES)

        if last:
            lax.fori_loop(0, last, full, None)
        do(jnp.int32(last), plan.vocabulary - last * plan.chunk * LANES)

    def _each(self, unit: Any, index: Any, tokens: int, do: Callable[[Any], None]) -> None:
        """do(copy) for every copy of a chunk."""
        plan = self.plan
        width = tokens if plan.interpreted else -(-tokens // LANES) * LANES
        start = pl.multiple_of(index * (plan.chunk * LANES), LANES)
        columns = pl.ds(start, width)
        slot = unit & 1
        semaphore = self.semaphores.at[slot, index]

        def one(row: Any, count: int, place: int | jax.Array) -> None:
            source = self.logits_ref.at[pl.ds(row, count), columns]
            target = self.buffer.at[slot, pl.ds(place, count), columns]
            do(pltpu.make_async_copy(source, target, semaphore))

        if plan.gathered:
            self._gathered(unit, one)
            return
        full, rest = divmod(plan.num_logits_rows, plan.unit)
        first = pl.multiple_of(unit * plan.unit, plan.unit)
        if not rest:
            one(first, plan.unit, 0)
        elif not full:
            one(first, self._rounded(rest), 0)
        else:
            pl.when(unit < full)(lambda: one(first, plan.unit, 0))
            pl.when(unit >= full)(lambda: one(first, self._rounded(rest), 0))

    def _gathered(self, unit: Any, one: Callable[[Any, int, Any], None]) -> None:
        plan = self.plan
        size = 2 if plan.is_packed else 1  # a word is the least that can be copied

        def target(j: jax.Array, _: None) -> None:
            row = self.rows_ref[unit * SUBLANES + j]
            if size == 1:
                one(row, 1, j)
            elif not plan.interpreted:
                one(pl.multiple_of(row, 2), 2, pl.multiple_of(2 * j, 2))
            else:
                one(row, min(2, plan.num_logits_rows), 2 * j)

        lax.fori_loop(0, SUBLANES, target, None)

    def _rounded(self, rows: int) -> int:
        """Rows of the last unit to copy: with the padding, where there is any."""
        plan = self.plan
        if plan.interpreted:
            return rows
        total = plan.num_logits_rows
        tile = 8 if total > 4 else 4 if total > 2 else 2 if total > 1 or plan.is_packed else 1
        return -(-rows // tile) * tile
