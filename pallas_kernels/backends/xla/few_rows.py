"""Few rows on a CPU: what keeps XLA from handing their operations to other threads.

A thread that sleeps is woken in 20 to 50 us, which is as long as all the work on a row. XLA's
runtime hands over whatever is ready in a list of more than eight operations. Its compiler splits
loops that compute more than they read.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.lowering.blocks import barrier, vary_like

FEW_ROWS = 3  # up to here, every operation's start counts

Outputs = TypeVar("Outputs")


def few_rows(x: jax.Array) -> bool:
    """Whether x [B, ...] has few rows; a symbolic number is not few."""
    return isinstance(x.shape[0], int) and x.shape[0] <= FEW_ROWS


def in_one_thread(function: Callable[..., Outputs], *arguments: Any) -> Outputs:
    """function(*arguments), as a list of operations of its own for XLA's runtime."""
    traced_once = jax.jit(function)

    def never(*arguments: Any) -> Outputs:
        like = jax.eval_shape(traced_once, *arguments)
        zeros = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), like)
        found: Outputs = vary_like(zeros, arguments)
        return found

    always = barrier(jnp.bool_(True))  # which the compiler does not see through
    found: Outputs = lax.cond(always, traced_once, never, *arguments)
    return found
