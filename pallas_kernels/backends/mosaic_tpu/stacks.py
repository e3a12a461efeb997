"""Stacks of candidates, one for each lane of each section of a row: logits and their columns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.mosaic_tpu.plan import GROUP, Plan
from pallas_kernels.backends.mosaic_tpu.unit import SHAPE, tree

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
        unfit: jax.Array = tree(jnp.maximum, found)
        return unfit


def push(stack: Stack, logit: jax.Array, column: jax.Array, wanted: jax.Array) -> Stack:
    """The stack with a candidate more, in lanes where it is wanted."""
    logits, columns = stack
    above = (logit, *logits[:-1])
    logits = tuple(jnp.where(wanted, new, old) for new, old in zip(above, logits, strict=True))
    after = (column, *columns[:-1])
    columns = tuple(jnp.where(wanted, new, old) for new, old in zip(after, columns, strict=True))
    return logits, columns


def push_each(stack: Stack, x: list[jax.Array], start: Any, bound: jax.Array) -> Stack:
    """Pushes what reaches the bound, of columns from `start` on."""
    first = jnp.full(SHAPE, start, jnp.int32).astype(jnp.float32)
    for i, one in enumerate(x):
        stack = push(stack, one, first + float(i), one >= bound)
    return stack


def push_groups(
    selection: Any, x: list[jax.Array], start: Any, bound: jax.Array
) -> tuple[Stack, jax.Array]:
    """Pushes the largest of each group of columns, if it reaches the bound.

    A selection is a stack and the largest logit that was not looked at: where that one reaches the
    bound too, the stack lacks a candidate.
    """
    stack, lost = selection
    first = jnp.full(SHAPE, start, jnp.int32).astype(jnp.float32)
    for begin in range(0, len(x), GROUP):
        group = x[begin : begin + GROUP]
        entries = [(one, jnp.full(SHAPE, float(i))) for i, one in enumerate(group)]
        losers: list[jax.Array] = []

        def join(a: Any, b: Any, losers: list[jax.Array] = losers) -> Any:
            losers.append(jnp.minimum(a[0], b[0]))
            return jnp.maximum(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])

        logit, column = tree(join, entries)
        lost = tree(jnp.maximum, [lost, *losers])
        stack = push(stack, logit, first + float(begin) + column, logit >= bound)
    return stack, lost
