"""Logits as integers in the same order: the one home of it, for XLA and for kernels.

XLA's CPU and TPU programs read subnormal floats as zero, so they take different subnormal logits
for equal; integers keep them apart, and cost two or three operations at each load.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.lowering import row_pieces


def ordered_keys(x: jax.Array) -> jax.Array:
    """Integers of the floats' size in the order of the floats x; -0.0 has the key of 0.0.

    A NaN lies beyond the infinity of its sign. `floats` is the inverse.
    """
    return mirrored(as_integers(x))


def floats(keys: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The floats of `dtype` that have these `ordered_keys`."""
    return lax.bitcast_convert_type(mirrored(keys), dtype)


def key_of(value: float, dtype: DTypeLike) -> jax.Array:
    """The key [] of one value in `dtype`."""
    return ordered_keys(jnp.full((), value, dtype))


def largest_and_first(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of the floats x [B, n] of each row, and the lowest id [B, n] that has it.

    No x is NaN. 0.0 stands for -0.0.
    """
    largest, first = row_pieces.largest_key_and_id(ordered_keys(x), ids)
    return floats(largest, x.dtype), first


def strictly_larger(x: jax.Array, than: jax.Array) -> jax.Array:
    """Where x is larger than `than`, two shapes that broadcast, one dtype. -0.0 equals 0.0.

    Anything where one of them is NaN.
    """
    turn, limit = turned(than)
    return (as_integers(x) ^ turn) > limit


def turned(than: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bits and a limit: x is larger than `than` where its own bits, xor these, are above the limit.

    Below a negative number the order of the bits is the reverse: one xor turns both sides, which is
    cheaper than a key for each x.
    """
    other = as_integers(floats(ordered_keys(than), than.dtype))  # as 0.0, -0.0 is not negative
    turn = jnp.where(other < 0, np.iinfo(other.dtype).max, jnp.zeros_like(other))
    return turn, other ^ turn


def limit_of_count(selected: jax.Array, inclusive: bool) -> jax.Array:
    """The limit above which a logit is counted in a token's rank.

    selected: the token's own logit, in the logits' dtype. Inclusive ranks count equal ones too.
    """
    return just_below(selected) if inclusive else selected


def is_counted(x: jax.Array, selected: jax.Array, inclusive: bool) -> jax.Array:
    """Whether logits are counted, by the floats' own comparison: see `limit_of_count`."""
    return x >= selected if inclusive else x > selected


def just_below(x: jax.Array) -> jax.Array:
    """The next smaller float of x's dtype; anything where x is -inf or NaN."""
    return floats(ordered_keys(x) - 1, x.dtype)


def canonical(x: jax.Array) -> jax.Array:
    """0.0 for -0.0, and -inf for NaN of either sign; every other value keeps its bits."""
    # Not `x == 0`, which is true of a subnormal where XLA flushes it.
    same = floats(ordered_keys(x), x.dtype)
    return jnp.where(jnp.isnan(x), jnp.full_like(x, -jnp.inf), same)


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of floats as signed integers of their size."""
    return lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")


def mirrored(bits: jax.Array) -> jax.Array:
    """Sign and magnitude as two's complement, and back: minus the magnitude for negative ones."""
    sign = jnp.array(np.iinfo(bits.dtype).min, bits.dtype)
    return jnp.where(bits < 0, sign - bits, bits)
