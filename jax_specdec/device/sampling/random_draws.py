"""The random numbers of sampling, and tokens drawn with them.

Every random number is a function of (request seed, position of the token it decides, purpose), so
a request's tokens depend on nothing else in the batch and on no earlier step. Drawing again at the
same position is sound: a draw is only ever used for the first token that is kept there.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import WHOLE, VocabShard

ACCEPT, RECOVER, DRAFT = 0, 1, 2  # purposes: independent random numbers at one position


def keys(seed: jax.Array, positions: jax.Array, purpose: int) -> jax.Array:
    """Random keys [...] for seeds [...] uint32 and positions [...] int32 of the same shape."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)

    flat = jax.vmap(one)(seed.reshape(-1), positions.reshape(-1))
    return flat.reshape(positions.shape)


def uniform(keys: jax.Array) -> jax.Array:
    """One float32 in [0, 1) for each of `keys` [...]. Returns [...]."""
    flat = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def categorical(keys: jax.Array, weights: jax.Array, *, shard: VocabShard = WHOLE) -> jax.Array:
    """A token id [B] drawn from unnormalized `weights` [B, V] with keys [B] (Gumbel-max).

    A token of weight 0 is never drawn while another has more. On a vocabulary shard, `weights` are
    those of its columns, and every shard returns the same id: the one that one device would draw.
    """
    ids = shard.ids(weights.shape[-1])
    scores = jnp.log(weights) + gumbel(keys, ids)
    best = scores == shard.maximum(scores)[:, None]
    return shard.minimum(jnp.where(best, jnp.broadcast_to(ids[None], best.shape), 2**31 - 1))


def gumbel(keys: jax.Array, ids: jax.Array) -> jax.Array:
    """Gumbel noise [B, C] float32, a function of each key [B] and each token id [C] alone.

    So whoever holds a part of the vocabulary makes the noise of that part.
    """

    def bits(key: jax.Array, id: jax.Array) -> jax.Array:
        words = jax.random.key_data(jax.random.fold_in(key, id))
        return words[0] ^ words[1]

    both = jax.vmap(jax.vmap(bits, (None, 0)), (0, None))(keys, ids)
    # All 32 bits, so that the smallest exponentials, which decide for rare tokens, are fine ones.
    u = (both.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, jnp.float32(1 - 2.0**-24))))
