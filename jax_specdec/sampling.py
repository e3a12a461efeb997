"""The distribution that a request's tokens are drawn from, and the random numbers of the draw.

Every random number is a function of (request seed, position of the token it decides, purpose), so
a request's tokens depend on nothing else in the batch and on no earlier step. Drawing again at the
same position is sound: a draw is only ever used for the first token that is kept there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import greedy


class Sampling(NamedTuple):
    """Per-slot sampling parameters, on the device. Axes: B slots."""

    temperature: jax.Array  # [B] float32, 0 is greedy
    top_k: jax.Array  # [B] int32, 0 keeps all
    top_p: jax.Array  # [B] float32, 1 keeps all
    min_p: jax.Array  # [B] float32, 0 keeps all
    seed: jax.Array  # [B] uint32

    @classmethod
    def greedy(cls, num_slots: int) -> "Sampling":
        zeros = jnp.zeros(num_slots, jnp.float32)
        return cls(
            temperature=zeros,
            top_k=jnp.zeros(num_slots, jnp.int32),
            top_p=jnp.ones(num_slots, jnp.float32),
            min_p=zeros,
            seed=jnp.zeros(num_slots, jnp.uint32),
        )


ACCEPT, RECOVER, DRAFT = 0, 1, 2  # purposes: independent random numbers at one position


def processed_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The processed distribution of each row: temperature, then top-k, top-p and min-p.

    Each filter works on the distribution that the one before it left, renormalized; tokens that
    tie at a boundary are kept lowest id first. A greedy request and an invalid row (a NaN, a +inf
    or no finite logit) give all probability to the greedy token.

    Args:
      logits: [B, S, V] float.
      sampling: parameters [B].

    Returns:
      [B, S, V] float32; each row sums to 1.
    """
    batch, positions, vocab = logits.shape
    choice = greedy(logits.reshape(-1, vocab))
    sampled = choice.valid.reshape(batch, positions, 1) & (sampling.temperature[:, None, None] > 0)
    one_hot = jax.nn.one_hot(choice.token_ids.reshape(batch, positions), vocab, dtype=jnp.float32)

    def draw_from() -> jax.Array:
        temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
        x = logits.astype(jnp.float32)
        x = (x - x.max(-1, keepdims=True)) / temperature[:, None, None]
        # At a huge T, dividing -inf multiplies it by 0: a masked token's weight is 0 at any T.
        weights = jnp.where(sampled & (logits > -jnp.inf), jnp.exp(x), 0.0)
        truncates = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
        weights = lax.cond(
            jnp.any(truncates & (sampling.temperature > 0)),
            lambda w: jnp.where(_kept(logits.astype(jnp.float32), w, sampling), w, 0.0),
            lambda w: w,
            weights,
        )
        total = weights.sum(-1, keepdims=True)
        return jnp.where(sampled, weights / jnp.where(total > 0, total, 1.0), one_hot)

    # A batch of greedy requests pays neither for exponentials nor for the sort.
    probs: jax.Array = lax.cond(jnp.any(sampled), draw_from, lambda: one_hot)
    return probs


def _kept(logits: jax.Array, weights: jax.Array, sampling: Sampling) -> jax.Array:
    """Which tokens top-k, top-p and min-p keep. [B, S, V] bool.

    Each filter keeps a prefix of the tokens in descending order, so the three together are one
    prefix, whatever is renormalized between them. The order is that of the logits: distinct ones
    may have equal weights.
    """
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    p = jnp.take_along_axis(weights, order, axis=-1)
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, None, :]

    def per_slot(values: jax.Array) -> jax.Array:
        return values[:, None, None]

    keep = (index < per_slot(sampling.top_k)) | (per_slot(sampling.top_k) == 0)
    p = jnp.where(keep, p, 0.0)
    mass = p.sum(-1, keepdims=True)
    before = jnp.cumsum(p, axis=-1) - p  # the mass of the tokens that come first
    top_p = per_slot(sampling.top_p)
    keep &= (before < top_p * mass) | (top_p >= 1) | (index == 0)
    keep &= p >= per_slot(sampling.min_p) * p[..., :1]
    rows = jnp.arange(weights.shape[0])[:, None, None]
    columns = jnp.arange(weights.shape[1])[None, :, None]
    return jnp.zeros(weights.shape, bool).at[rows, columns, order].set(keep, unique_indices=True)


def keys(seed: jax.Array, positions: jax.Array, purpose: int) -> jax.Array:
    """Random keys [...] for seeds [...] uint32 and positions [...] int32 of the same shape."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)

    flat = jax.vmap(one)(seed.reshape(-1), positions.reshape(-1))
    return flat.reshape(positions.shape)


def uniform(keys: jax.Array) -> jax.Array:
    """One float32 in [0, 1) for each key."""
    flat = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def categorical(keys: jax.Array, weights: jax.Array) -> jax.Array:
    """A token id [B] drawn from unnormalized `weights` [B, V] with keys [B] (Gumbel-max).

    A token of weight 0 is never drawn while another has more.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, weights.shape[1:], jnp.float32))(keys)
    return jnp.argmax(jnp.log(weights) + noise, axis=-1).astype(jnp.int32)
