"""The random numbers of sampling, and tokens drawn with them.

Every random number is a function of (request seed, position of the token it decides, purpose), so
a request's tokens depend on nothing else in the batch and on no earlier step. Drawing again at the
same position is sound: a draw is only ever used for the first token that is kept there.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Key, UInt32

from pallas_kernels import WHOLE, VocabShard

ACCEPT, RECOVER, DRAFT = 0, 1, 2  # purposes: independent random numbers at one position


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


def categorical(
    keys: Key[Array, " B"], weights: Float[Array, "B V"], *, shard: VocabShard = WHOLE
) -> Int32[Array, " B"]:
    """Draw a token id of each row from unnormalized weights (Gumbel-max).

    A token of weight 0 is never drawn while another has more. On a vocabulary shard, `weights` are
    those of its columns, and every shard returns the same id: the one that one device would draw.
    """
    ids = shard.ids(weights.shape[-1])
    scores = jnp.log(weights) + gumbel(keys, ids)
    best = scores == shard.maximum(scores)[:, None]
    return shard.minimum(jnp.where(best, jnp.broadcast_to(ids[None], best.shape), 2**31 - 1))


def gumbel(keys: Key[Array, " B"], ids: Int32[Array, " C"]) -> Float32[Array, "B C"]:
    """Gumbel noise, a function of each key and each token id alone.

    So a device that holds a part of the vocabulary makes the noise of that part.
    """

    def bits(key: jax.Array, id: jax.Array) -> jax.Array:
        words = jax.random.key_data(jax.random.fold_in(key, id))
        return words[0] ^ words[1]

    both = jax.vmap(jax.vmap(bits, (None, 0)), (0, None))(keys, ids)
    # All 32 bits, so that the smallest exponentials, which decide for rare tokens, are fine ones.
    u = (both.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, jnp.float32(1 - 2.0**-24))))
