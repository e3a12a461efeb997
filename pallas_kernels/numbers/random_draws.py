"""The random numbers of sampling.

Every random number is a function of (request seed, position of the token it decides, purpose) and,
for noise, of the group or token that it belongs to. So a request's tokens depend on nothing else in
the batch and on no earlier step. Drawing again at the same position is sound: a draw is only ever
used for the first token that is kept there.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from pallas_kernels.lowering.blocks import barrier
from pallas_kernels.numbers.gumbel import gumbel_of_bits
from pallas_kernels.numbers.pieces import largest_and_first
from pallas_kernels.numbers.threefry import word as threefry_word

# Purposes: independent random numbers at one position. A token after the drafts is drawn in two
# steps, with noise of its group (GROUP) and of itself (RECOVER).
ACCEPT, RECOVER, DRAFT, GROUP = 0, 1, 2, 3
WIDTH = 256  # ids, of which noise is made at once: as many as a group of tokens has


class Source(NamedTuple):
    """What the random numbers of one token depend on, beside their purpose."""

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
    padding = ((0, 0), (0, max(WIDTH - ids.shape[1], 0)))
    filled = barrier(jnp.pad(ids, padding))
    bits = threefry_word(source.seed[:, None], purpose, source.position[:, None], filled)
    return gumbel_of_bits(bits)[:, : ids.shape[1]]


def best(
    scores: Float32[Array, "B C"], ids: Int32[Array, "B C"]
) -> tuple[Float32[Array, " B"], Int32[Array, " B"]]:
    """The largest score of each row, and the lowest id that has it."""
    return largest_and_first(scores, ids)
