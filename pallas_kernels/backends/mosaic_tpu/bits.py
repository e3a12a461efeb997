"""Bit masks of tokens, turned so that a lane has its own tokens' bits.

A row's words come as in `changes.Changes`: bit b of word w is that of token 32 w + b. So a vector
of 128 words has the bits of 32 columns of 128 tokens, and those of a column are in four of its
lanes. Turned, bit j of lane l is that of token l of column j: a shift brings it to the lane's sign.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_tpu.plan import LANES, SUBLANES, WORD_COLUMNS, Plan

SHAPE = (SUBLANES, LANES)
AT_ONCE = 8  # vectors: their permutations run side by side
# Each step's distance, and the bits whose place has no 1 there.
STEPS = ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555))


def turn(plan: Plan, allowed_ref: Any, rows: list[Any], turned_ref: Any) -> None:
    """Turns the words of a unit's rows: of each half, 8 rows of allowed_ref [batch rows, words].

    Writes them to turned_ref [unit, words].
    """
    count = plan.words // LANES
    for half, of_half in enumerate(rows):

        def some(first: Any, number: int, half: int = half, of_half: Any = of_half) -> None:
            start = pl.multiple_of(first * LANES, LANES)
            words = allowed_ref[of_half, pl.ds(start, number * LANES)]
            found = [turned(words[:, i * LANES : (i + 1) * LANES]) for i in range(number)]
            target = pl.ds(half * SUBLANES, SUBLANES)
            turned_ref[target, pl.ds(start, number * LANES)] = jnp.concatenate(found, axis=1)

        def full(i: jax.Array, _: None) -> None:
            some(i * AT_ONCE, AT_ONCE)

        turns, rest = divmod(count, AT_ONCE)
        if turns:
            lax.fori_loop(0, turns, full, None)
        if rest:
            some(turns * AT_ONCE, rest)


def turned(words: jax.Array) -> jax.Array:
    """Words [8, 128] int32 of 32 columns: four 32 x 32 matrices of bits, each transposed."""
    lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
    # Lane 32 q + j: word q of column j.
    x = _permuted(words, 4 * (lanes & (WORD_COLUMNS - 1)) + lax.div(lanes, WORD_COLUMNS))
    for distance, mask in STEPS:
        other = _permuted(x, lanes ^ distance)
        is_low = (lanes & distance) == 0
        kept = jnp.where(is_low, jnp.int32(mask), jnp.int32(~mask))
        up, down = other << distance, lax.shift_right_logical(other, jnp.full(SHAPE, distance))
        x = (x & kept) | (jnp.where(is_low, up, down) & ~kept)
    return x


def is_allowed(words: jax.Array, column: Any) -> jax.Array:
    """Whether the tokens of a column of a vector of turned words are allowed: [8, 128] bool."""
    found: jax.Array = (words << (WORD_COLUMNS - 1 - column)) < 0
    return found


def _permuted(x: jax.Array, lanes: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")
