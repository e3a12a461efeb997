"""Stacks of candidates, one for each lane of each section of a row: logits and their columns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_tpu.plan import Plan
from pallas_kernels.mosaic_tpu.unit import SHAPE, tree

MAGNITUDE = 0x7FFFFFFF
MIN_NORMAL = 0x00800000  # float32's smallest normal number, as bits

Stack = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]  # depth + 1 logits, depth columns


class Stacks(NamedTuple):
    """The stacks of a batch. -inf stands for no candidate."""

    plan: Plan
    logits: Any  # [sections * (depth + 1), batch rows, 128] float32; more than depth: overflow
    columns: Any  # [sections * (depth + 1), batch rows, 128] float32; the last ones are not used

    def clear(self, rows: Any) -> None:
        for slot in range(self.plan.slots):
            self.logits[slot, rows, :] = jnp.full(SHAPE, -jnp.inf, jnp.float32)
            self.columns[slot, rows, :] = jnp.zeros(SHAPE, jnp.float32)

    def load(self, section: Any, rows: Any) -> Stack:
        depth = self.plan.depth
        first = section * (depth + 1)
        logits = tuple(self.logits[first + i, rows, :] for i in range(depth + 1))
        return logits, tuple(self.columns[first + i, rows, :] for i in range(depth))

    def store(self, section: Any, rows: Any, stack: Stack) -> None:
        first = section * (self.plan.depth + 1)
        for i, x in enumerate(stack[0]):
            self.logits[first + i, rows, :] = x
        for i, x in enumerate(stack[1]):
            self.columns[first + i, rows, :] = x

    def unfit(self, rows: Any) -> jax.Array:
        """1.0 in lanes [8, 128] that lost a candidate, or have one whose order is not certain.

        Floats compare subnormal numbers as if they were zeros.
        """
        depth = self.plan.depth
        found = []
        for slot in range(self.plan.slots):
            x = self.logits[slot, rows, :]
            if slot % (depth + 1) == depth:
                bad = x > -jnp.inf
            else:
                size = lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE
                bad = (size > 0) & (size < MIN_NORMAL)
            found.append(jnp.where(bad, 1.0, 0.0))
        return tree(jnp.maximum, found)


def push(stack: Stack, logit: jax.Array, column: jax.Array, wanted: jax.Array) -> Stack:
    """The stack with a candidate more, in lanes where it is wanted."""
    logits, columns = stack
    above = (logit, *logits[:-1])
    logits = tuple(jnp.where(wanted, new, old) for new, old in zip(above, logits, strict=True))
    after = (column, *columns[:-1])
    columns = tuple(jnp.where(wanted, new, old) for new, old in zip(after, columns, strict=True))
    return logits, columns
