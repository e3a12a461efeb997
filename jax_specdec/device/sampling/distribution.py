"""The distribution that a request's tokens are drawn from.

`draws.py` draws from it, with random numbers that are functions of (request seed, position of the
token that they decide, purpose) and of nothing else.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec.device.sampling import exact_sums, threshold_search
from pallas_kernels import WHOLE, Greedy, VocabShard, greedy, vary_like


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


class Truncation(NamedTuple):
    """What the filters leave of rows [...]: the tokens down to the cut, in descending order.

    Equal logits come lowest id first. A token t is kept if x[t] > cut_logit, or x[t] == cut_logit
    and t < cut_id, or t is cut_id. Its probability is its share of softmax((x - m) / T), times
    exp(-log_kept).
    """

    cut_logit: jax.Array  # [...] float32; -inf where nothing is cut, inf where one token is kept
    cut_id: jax.Array  # [...] int32, of the last kept token; V - 1 where nothing is cut
    log_kept: jax.Array  # [...] float32, at most 0: log of the kept tokens' share

    @classmethod
    def nothing(cls, rows: tuple[int, ...], vocab_size: int) -> "Truncation":
        """Of rows [...] of which nothing is cut."""
        last = jnp.full(rows, vocab_size - 1, jnp.int32)
        return cls(jnp.full(rows, -jnp.inf, jnp.float32), last, jnp.zeros(rows, jnp.float32))

    @classmethod
    def greedy(cls, token_ids: jax.Array) -> "Truncation":
        """Of rows that keep one token each: [...] int32. Known without a look at the logits."""
        rows = token_ids.shape
        cut = cls(jnp.full(rows, jnp.inf, jnp.float32), token_ids, jnp.zeros(rows, jnp.float32))
        return vary_like(cut, token_ids)

    def keeps(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """Which tokens are kept. [..., C] bool for logits [..., C] float32 and their ids."""
        cut_logit, cut_id = self.cut_logit[..., None], self.cut_id[..., None]
        ties = (logits == cut_logit) & (ids < cut_id)
        return (logits > cut_logit) | ties | (ids == cut_id)


def truncation(
    logits: jax.Array,
    sampling: Sampling,
    *,
    shard: VocabShard = WHOLE,
    choice: Greedy | None = None,
) -> Truncation:
    """Which tokens temperature, then top-k, top-p and min-p leave.

    Each filter works on the distribution that the one before it left, renormalized; tokens that
    tie at a boundary are kept lowest id first. Each keeps a prefix of the tokens in descending
    order, so the three together are one prefix. A greedy request and an invalid row (a NaN, a +inf
    or no finite logit) keep the greedy token alone, with log_kept 0.

    The result is the same, bit for bit, for every number of vocabulary shards. Against exact
    arithmetic, log_kept is off by at most 2e-6, and a top-p or min-p boundary by no more than
    moving top_p or min_p by 2e-6 of itself would do, plus what the float32 weights are off.

    Args:
      logits: [B, ..., V] bfloat16, float16 or float32; on a vocabulary shard, its columns.
      sampling: parameters [B].
      shard: what this device holds of each row.
      choice: the greedy choice, [...] each, where it is known already.
    """
    logits = shard.masked(logits)
    if choice is None:
        choice = _greedy(logits, shard)
    vocab_size = shard.size(logits.shape[-1])
    sampled = _is_sampled(sampling, choice)
    cuts = sampled & _per_row(_truncates(sampling), sampled)
    everything = vary_like(Truncation.nothing(sampled.shape, vocab_size), cuts)

    def where(rows: jax.Array, a: Truncation, b: Truncation) -> Truncation:
        chosen: Truncation = jax.tree.map(lambda x, y: jnp.where(rows, x, y), a, b)
        return chosen

    # A batch that cuts nothing pays for nothing.
    found: Truncation = lax.cond(
        jnp.any(cuts),
        lambda: where(cuts, _cut(logits, sampling, shard), everything),
        lambda: everything,
    )
    return where(sampled, found, Truncation.greedy(choice.token_ids))


def processed_probs(
    logits: jax.Array,
    sampling: Sampling,
    *,
    shard: VocabShard = WHOLE,
    choice: Greedy | None = None,
    cut: Truncation | None = None,
) -> jax.Array:
    """The processed distribution of each row: that of the tokens which `truncation` keeps.

    Args: as `truncation`; and its result, `cut`, where it is known already.

    Returns:
      [B, ..., V] float32; each row sums to 1, over all shards. A greedy request and an invalid row
      give all probability to the greedy token. Bit for bit the same for every number of shards.
    """
    logits = shard.masked(logits)
    if choice is None:
        choice = _greedy(logits, shard)
    ids = _ids(logits, shard)
    vocab_size = shard.size(logits.shape[-1])
    sampled = _is_sampled(sampling, choice)
    one_hot = (ids == choice.token_ids[..., None]).astype(jnp.float32)

    def draw_from() -> jax.Array:
        known = truncation(logits, sampling, shard=shard, choice=choice) if cut is None else cut
        x = logits.astype(jnp.float32)
        scaled = _scaled(x, shard.maximum(x), sampling)
        kept = sampled[..., None] & known.keeps(x, ids)
        weights = jnp.where(kept, _weights(x, scaled), 0.0)
        parts = exact_sums.digits(weights, vocab_size)
        total = exact_sums.to_float(exact_sums.mass(parts, kept, shard, vocab_size), vocab_size)[
            ..., None
        ]
        return jnp.where(sampled[..., None], weights / jnp.where(total > 0, total, 1.0), one_hot)

    # A batch of greedy requests pays for no exponentials.
    probs: jax.Array = lax.cond(jnp.any(sampled), draw_from, lambda: one_hot)
    return probs


def _cut(logits: jax.Array, sampling: Sampling, shard: VocabShard) -> Truncation:
    """`truncation` of valid rows of requests that are not greedy; anything in others."""
    vocab_size = shard.size(logits.shape[-1])
    key_bits = 8 * logits.dtype.itemsize
    x = logits.astype(jnp.float32)
    largest = shard.maximum(x)
    ids = _ids(logits, shard)
    tokens = threshold_search.order(logits, ids)
    scaled = _scaled(x, largest, sampling)
    parts = exact_sums.digits(_weights(x, scaled), vocab_size)
    rows = largest.shape
    everything = threshold_search.LastKept(
        jnp.full(rows, -(2 ** (key_bits - 1)), jnp.int32), jnp.full(rows, vocab_size, jnp.int32)
    )
    everything = vary_like(everything, largest)

    def mass(where: jax.Array) -> exact_sums.Mass:
        return exact_sums.mass(parts, where, shard, vocab_size)

    def to_float(value: exact_sums.Mass) -> jax.Array:
        return exact_sums.to_float(value, vocab_size)

    top_k = _per_row(sampling.top_k, largest)

    def has_k(where: jax.Array) -> jax.Array:
        return (shard.sum(where.astype(jnp.int32)) >= top_k) & (top_k > 0)

    def find(reaches: Callable[[jax.Array], jax.Array]) -> threshold_search.LastKept:
        return threshold_search.last_within(tokens, key_bits, vocab_size, reaches, shard)

    first_k = lax.cond(jnp.any(sampling.top_k > 0), lambda: find(has_k), lambda: everything)
    kept = threshold_search.within(tokens, first_k)

    top_p = _per_row(sampling.top_p, largest)

    def first_p() -> threshold_search.LastKept:
        wanted = top_p * to_float(mass(kept))
        limit = exact_sums.at_least(jnp.maximum(wanted, 1e-30), vocab_size)  # never nothing

        def has_p(where: jax.Array) -> jax.Array:
            return ~exact_sums.less(mass(where & kept), limit) & (top_p < 1)

        return find(has_p)

    kept &= threshold_search.within(
        tokens, lax.cond(jnp.any(sampling.top_p < 1), first_p, lambda: everything)
    )
    # On logarithms: exp may round so that a smaller logit gets a larger weight.
    lowest = _per_row(sampling.temperature * jnp.log(sampling.min_p), x)
    kept &= x - largest[..., None] >= lowest
    kept &= x > -jnp.inf
    cut_logit = shard.minimum(jnp.where(kept, x, jnp.inf))
    log_kept = jnp.log(to_float(mass(kept)) / to_float(mass(x > -jnp.inf)))
    return Truncation(
        cut_logit,
        shard.maximum(jnp.where(kept & (x == cut_logit[..., None]), ids, -1)),
        jnp.minimum(log_kept, 0.0),
    )


def _greedy(logits: jax.Array, shard: VocabShard) -> Greedy:
    """The greedy choice of rows [..., V]: [...] each."""
    choice = greedy(
        logits.reshape(-1, logits.shape[-1]),
        axis_name=shard.axis_name,
        vocab_size=shard.vocab_size,
    )
    rows = logits.shape[:-1]
    return Greedy(choice.token_ids.reshape(rows), choice.valid.reshape(rows))


def _scaled(x: jax.Array, largest: jax.Array, sampling: Sampling) -> jax.Array:
    """(x - m) / T [B, ..., V] float32; with T = 1 where the request is greedy."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    return (x - largest[..., None]) * _per_row(1 / temperature, x)


def _weights(x: jax.Array, scaled: jax.Array) -> jax.Array:
    """exp((x - m) / T). At a huge T, dividing -inf gives 0; a masked token weighs 0 at any T."""
    return jnp.where(x > -jnp.inf, exact_sums.exponential(scaled), 0.0)


def _truncates(sampling: Sampling) -> jax.Array:
    """[B] bool."""
    return (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)


def _is_sampled(sampling: Sampling, choice: Greedy) -> jax.Array:
    """[B, ...] bool: not of a greedy request, and not an invalid row."""
    return choice.valid & (_per_row(sampling.temperature, choice.valid) > 0)


def _per_row(values: jax.Array, like: jax.Array) -> jax.Array:
    """Values [B] as [B, 1, ...] with as many axes as `like`."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def _ids(logits: jax.Array, shard: VocabShard) -> jax.Array:
    """The token ids of logits [..., V], broadcast."""
    ids = shard.ids(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.broadcast_to(ids, logits.shape)
