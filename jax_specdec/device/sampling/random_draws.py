"""The random numbers of sampling.

Every random number is a function of (request seed, position of the token it decides, purpose) and,
for noise, of the group or token that it belongs to. So a request's tokens depend on nothing else in
the batch and on no earlier step. Drawing again at the same position is sound: a draw is only ever
used for the first token that is kept there.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key, UInt32

from pallas_kernels import logarithm

# Purposes: independent random numbers at one position. A token after the drafts is drawn in two
# steps, with noise of its group (GROUP) and of itself (RECOVER).
ACCEPT, RECOVER, DRAFT, GROUP = 0, 1, 2, 3


def keys(
    seed: UInt32[Array, "*rows"], positions: Int32[Array, "*rows"], purpose: int
) -> Key[Array, "*rows"]:
    """Random keys for seeds and positions."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)

    flat = jax.vmap(one)(seed.reshape(-1), positions.reshape(-1))
    return flat.reshape(positions.shape)


def uniform(keys: Key[Array, "*rows"]) -> Float32[Array, "*rows"]:
    """One number in [0, 1) for each key."""
    flat = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def gumbel(keys: Key[Array, " B"], ids: Int32[Array, "B C"]) -> Float32[Array, "B C"]:
    """Gumbel noise, a function of each row's key and each id alone.

    So a device that holds a part of a row makes the noise of that part.
    """

    def bits(key: jax.Array, id: jax.Array) -> jax.Array:
        words = jax.random.key_data(jax.random.fold_in(key, id))
        return words[0] ^ words[1]

    both = jax.vmap(jax.vmap(bits, (None, 0)))(keys, ids)
    # All 32 bits, so that the smallest exponentials, which decide for rare tokens, are fine ones.
    u = jnp.minimum((both.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), 1 - 2.0**-24)
    # -log(1 - u): what 1 - u loses by rounding, the quotient gives back (W. Kahan).
    rest = 1 - u
    lost = jnp.where(rest < 1, 1 - rest, jnp.float32(1))
    exponential = jnp.where(rest < 1, -logarithm(rest) * (u / lost), u)
    # After a minimum that changes nothing, no compiler contracts the product and a sum.
    return -logarithm(jnp.minimum(exponential, jnp.float32(32)))


def best(
    scores: Float32[Array, "B C"], ids: Int32[Array, "B C"]
) -> tuple[Float32[Array, " B"], Int32[Array, " B"]]:
    """The largest score of each row, and the lowest id that has it."""
    score = scores.max(axis=1)
    largest = scores == score[:, None]
    return score, jnp.min(jnp.where(largest, ids, 2**31 - 1), axis=1)


def log_of(weights: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """log of weights, 0 or more; -inf of what is 0, or next to it."""
    some = weights > jnp.float32(1e-37)  # `logarithm` is for normal numbers
    return jnp.where(some, logarithm(jnp.where(some, weights, jnp.float32(1))), -jnp.inf)
