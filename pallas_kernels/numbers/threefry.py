"""Threefry-2x32 of 20 rounds (Salmon, Moraes, Dror and Shaw, SC 2011), as one expression.

`jax.random` has the same function. But a key of its own for each request, position and purpose
takes a run of it for each, which on a CPU is a loop of small operations. Here all of them are the
key and the counter of one run, whose first word is the random number.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def word(
    seed: UInt32[Array, "..."], purpose: int, position: Int32[Array, "..."], ids: jax.Array
) -> UInt32[Array, "..."]:
    """32 random bits for each id [int32]; the arguments broadcast.

    The first word of threefry2x32 of the key (purpose, seed) and the counter (position, id).
    """
    # An integer of another type that joined would make the shifts below arithmetic.
    first, second = jnp.uint32(purpose), seed.astype(jnp.uint32)
    schedule = (first, second, first ^ second ^ jnp.uint32(PARITY))
    x: jax.Array = schedule[0] + position.astype(jnp.uint32)
    y = schedule[1] + ids.astype(jnp.uint32)
    for turn in range(5):
        for bits in ROTATIONS[turn % 2]:
            x = x + y
            y = x ^ ((y << bits) | (y >> (32 - bits)))
        x = x + schedule[(turn + 1) % 3]
        y = y + schedule[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x
