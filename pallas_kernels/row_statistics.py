"""One read of a block of rows: the sum of exponentials and the count of larger logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ordered_keys import strictly_larger

CPU_GROUP = 8  # float32 lanes of a vector register


class Given(NamedTuple):
    """What is known of each row, [B]."""

    reference: jax.Array  # float32, subtracted before `exp`: the row's maximum, or 0
    selected: jax.Array  # of the logits' dtype, the given token's logit
    temperatures: jax.Array | None  # float32, usable ones; None: 1


def sums(x: jax.Array, given: Given) -> tuple[jax.Array, jax.Array]:
    """The sum of exponentials [B] float32 and the number of larger logits [B] int32 of x [B, V]."""
    with jax.named_scope("row_statistics"):
        return _as_counted(_added(_terms(x, given), axis=1))


def sums_on_cpu(x: jax.Array, given: Given) -> tuple[jax.Array, jax.Array]:
    """`sums` over short groups, then over the groups.

    XLA's CPU compiler vectorizes such a loop. Of a plain sum over the row it makes a loop that
    writes every term, and another that adds them.
    """
    with jax.named_scope("row_statistics"):
        rows, vocabulary = x.shape
        padding = -vocabulary % CPU_GROUP
        if padding:
            x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=-jnp.inf)
        each: Given = jax.tree.map(lambda one: one[:, None], given)
        of_groups = _added(_terms(x.reshape(rows, -1, CPU_GROUP), each), axis=2)
        exponentials, larger = (jnp.sum(part, axis=1) for part in of_groups)
        return _as_counted((exponentials, larger))


def _terms(x: jax.Array, given: Given) -> tuple[jax.Array, jax.Array]:
    """What the two sums add: float32 [..., V] of x [..., V] and `given` [...]."""
    scaled = x.astype(jnp.float32) - given.reference[..., None]
    if given.temperatures is not None:
        # A product is enough inside a sum of exponentials; finish divides.
        usable = ~jnp.isnan(given.temperatures)
        inverse = jnp.where(usable, 1 / given.temperatures, jnp.float32(1))
        scaled = scaled * inverse[..., None]
    # Counted in float32 (exact below 2**24): on a CPU several times faster than in int32.
    larger = strictly_larger(x, given.selected[..., None])
    return jnp.exp(scaled), jnp.where(larger, jnp.float32(1), jnp.float32(0))


def _added(terms: tuple[jax.Array, jax.Array], axis: int) -> tuple[jax.Array, jax.Array]:
    """Both sums along an axis, in one read."""
    zero = jnp.float32(0)
    found: tuple[jax.Array, jax.Array] = lax.reduce(
        terms, (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), dimensions=(axis,)
    )
    return found


def _as_counted(found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    exponentials, larger = found
    return exponentials, larger.astype(jnp.int32)
