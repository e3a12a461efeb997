"""The random numbers of sampling.

Every random number is a function of (request seed, position of the token it decides, purpose) and,
for noise, of the group or token that it belongs to. So a request's tokens depend on nothing else in
the batch and on no earlier step. Drawing again at the same position is sound: a draw is only ever
used for the first token that is kept there.

The bits are those of Threefry-2x32 of 20 rounds (Salmon, Moraes, Dror and Shaw, SC 2011), as one
expression. `jax.random` has the same function, but a key of its own for each request, position and
purpose takes a run of it for each, which on a CPU is a loop of small operations. Here all of them
are the key and the counter of one run, whose first word is the random number.

XLA and the kernels draw with the same arithmetic, so that they draw the same tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from pallas_kernels.lowering.forms import barrier
from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.numbers.ordered_keys import largest_and_first

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

PARITY = 0x1BD11BDA


def threefry_word(
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


def gumbel_of_bits(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """`gumbel_noise` for XLA: on a CPU the bits are not computed for each of its parts."""
    return gumbel_noise(prevent_recompute(bits.astype(jnp.float32)))


def gumbel_noise(bits: UInt32[Array, "..."] | Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Gumbel noise, one number of each 32 random bits, or of such as float32."""
    # All 32 bits, so that the smallest exponentials, which decide for rare tokens, are fine ones.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), 1 - 2.0**-24)
    # -log(1 - u): what 1 - u loses by rounding, the quotient gives back (W. Kahan).
    rest = 1 - u
    lost = jnp.where(rest < 1, 1 - rest, jnp.float32(1))
    exponential = jnp.where(rest < 1, -logarithm(rest) * (u / lost), u)
    # After a minimum that changes nothing, no compiler contracts the product and a sum.
    return -logarithm(jnp.minimum(exponential, jnp.float32(32)))


def log_of(weights: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """log of weights, 0 or more; -inf of what is 0, or next to it."""
    some = weights > jnp.float32(1e-37)  # `logarithm` is for normal numbers
    return jnp.where(some, logarithm(jnp.where(some, weights, jnp.float32(1))), -jnp.inf)


# Purposes: independent random numbers at one position. A token after the drafts is drawn in two
# steps, with noise of its group (GROUP) and of itself (RECOVER).
ACCEPT, RECOVER, DRAFT, GROUP = 0, 1, 2, 3

_WIDTH = 256  # ids, of which noise is made at once: as many as a group of tokens has


class Source(NamedTuple):
    """The source of one token's random numbers, beside their purpose."""

    seed: UInt32[Array, "*rows"]  # of the request
    position: Int32[Array, "*rows"]  # of the token that they decide


def uniform(source: Source, purpose: int) -> Float32[Array, "*rows"]:
    """One number in [0, 1), a multiple of 2**-23, for each row."""
    bits = threefry_word(source.seed, purpose, source.position, jnp.zeros((), jnp.int32)) >> 9
    return lax.bitcast_convert_type(bits | jnp.uint32(0x3F800000), jnp.float32) - 1


def gumbel(source: Source, purpose: int, ids: Int32[Array, "B C"]) -> Float32[Array, "B C"]:
    """Gumbel noise, a function of each row's source [B] and each id alone.

    So a device that holds a part of a row makes the noise of that part.
    """
    # Filled up, and apart from how the ids came about: the noise of few tokens, of candidates and
    # of a group are the same kernels, which XLA compiles once.
    padding = ((0, 0), (0, max(_WIDTH - ids.shape[1], -ids.shape[1] % 32)))  # whole vectors
    filled = barrier(jnp.pad(ids, padding))
    bits = threefry_word(source.seed[:, None], purpose, source.position[:, None], filled)
    return gumbel_of_bits(bits)[:, : ids.shape[1]]


def best(
    scores: Float32[Array, "B C"], ids: Int32[Array, "B C"]
) -> tuple[Float32[Array, " B"], Int32[Array, " B"]]:
    """The largest score of each row, and the lowest id that has it."""
    return largest_and_first(scores, ids)
