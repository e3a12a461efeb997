"""The distribution that a request's tokens are drawn from.

`random_draws.py` draws from it, with random numbers that are functions of (request seed, position
of the token that they decide, purpose) and of nothing else.

Axes: B slots, `*rows` what lies between slot and vocabulary (often S positions), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jax_specdec.device.sampling import exact_sums, threshold_search
from pallas_kernels import WHOLE, Greedy, VocabShard, greedy, vary_like


class Sampling(NamedTuple):
    """Sampling parameters of each slot, on the device."""

    temperature: Float32[Array, " B"]  # 0 is greedy
    top_k: Int32[Array, " B"]  # 0 keeps all
    top_p: Float32[Array, " B"]  # 1 keeps all
    min_p: Float32[Array, " B"]  # 0 keeps all
    seed: UInt32[Array, " B"]

    @classmethod
    def greedy(cls, num_slots: int) -> "Sampling":
        """The parameters of slots that are all greedy."""
        zeros = jnp.zeros(num_slots, jnp.float32)
        return cls(
            temperature=zeros,
            top_k=jnp.zeros(num_slots, jnp.int32),
            top_p=jnp.ones(num_slots, jnp.float32),
            min_p=zeros,
            seed=jnp.zeros(num_slots, jnp.uint32),
        )


class Truncation(NamedTuple):
    """The tokens of rows [...] that the filters keep; a value of this type is called a cut.

    Tokens are in descending order of their logits, equal logits lowest id first, and are kept down
    to the cut: a token t is kept if x[t] > cut_logit, or x[t] == cut_logit and t < cut_id, or t is
    cut_id. Its probability is its share of softmax((x - m) / T), times exp(-log_kept).
    """

    cut_logit: Float32[Array, "..."]  # -inf where all are kept, inf where one is
    cut_id: Int32[Array, "..."]  # the last kept token; V - 1 where all are kept
    log_kept: Float32[Array, "..."]  # at most 0: log of the kept tokens' share

    @classmethod
    def nothing(cls, rows: tuple[int, ...], vocab_size: int) -> "Truncation":
        """The cut of rows [...] that keep every token."""
        last = jnp.full(rows, vocab_size - 1, jnp.int32)
        return cls(jnp.full(rows, -jnp.inf, jnp.float32), last, jnp.zeros(rows, jnp.float32))

    @classmethod
    def greedy(cls, token_ids: Int32[Array, "..."]) -> "Truncation":
        """The cut of rows that keep one token each. It is known without a look at the logits."""
        rows = token_ids.shape
        cut = cls(jnp.full(rows, jnp.inf, jnp.float32), token_ids, jnp.zeros(rows, jnp.float32))
        return vary_like(cut, token_ids)

    def keeps(
        self, logits: Float32[Array, "*rows C"], ids: Int32[Array, "*rows C"]
    ) -> Bool[Array, "*rows C"]:
        """Which of the tokens `ids`, with these logits, are kept."""
        cut_logit, cut_id = self.cut_logit[..., None], self.cut_id[..., None]
        ties = (logits == cut_logit) & (ids < cut_id)
        return (logits > cut_logit) | ties | (ids == cut_id)


def truncation(
    logits: Float[Array, "B *rows V"],
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
    moving top_p or min_p by 2e-6 of itself would do, plus the error of the float32 weights.

    Args:
      logits: bfloat16, float16 or float32; on a vocabulary shard, its columns.
      sampling: each slot's parameters.
      shard: the columns of each row that this device holds.
      choice: the greedy choice of all B * ... rows, where it is known already.
    """
    logits = shard.masked(logits)
    greedy_ids, sampled = _choices(logits, sampling, shard, choice)
    cuts = sampled & _per_row(_truncates(sampling), sampled)
    everything = Truncation.nothing(sampled.shape, shard.size(logits.shape[-1]))
    everything = vary_like(everything, cuts)
    # A batch that cuts nothing pays for nothing.
    found: Truncation = lax.cond(
        jnp.any(cuts),
        lambda: _where(cuts, _searched(logits, sampling, shard), everything),
        lambda: everything,
    )
    return _where(sampled, found, Truncation.greedy(greedy_ids))


def processed_probs(
    logits: Float[Array, "B *rows V"],
    sampling: Sampling,
    *,
    shard: VocabShard = WHOLE,
    choice: Greedy | None = None,
    cut: Truncation | None = None,
) -> Float32[Array, "B *rows V"]:
    """The processed distribution of each row: that of the tokens which `truncation` keeps.

    Args:
      logits, sampling, shard, choice: as for `truncation`.
      cut: the result of `truncation`, where it is known already.

    Returns:
      Probabilities; each row sums to 1, over all shards. A greedy request and an invalid row give
      all probability to the greedy token. Bit for bit the same for every number of shards.
    """
    logits = shard.masked(logits)
    ids = _ids(logits, shard)
    vocab_size = shard.size(logits.shape[-1])
    greedy_ids, sampled = _choices(logits, sampling, shard, choice)
    one_hot = (ids == greedy_ids[..., None]).astype(jnp.float32)

    def shares() -> jax.Array:
        known = truncation(logits, sampling, shard=shard, choice=choice) if cut is None else cut
        x = logits.astype(jnp.float32)
        kept = sampled[..., None] & known.keeps(x, ids)
        weights = jnp.where(kept, _weights(x, shard.maximum(x), sampling), 0.0)
        parts = exact_sums.digits(weights, vocab_size)
        total = exact_sums.to_float(exact_sums.mass(parts, kept, shard, vocab_size), vocab_size)
        total = total[..., None]
        return jnp.where(sampled[..., None], weights / jnp.where(total > 0, total, 1.0), one_hot)

    # A batch of greedy requests pays for no exponentials.
    probs: jax.Array = lax.cond(jnp.any(sampled), shares, lambda: one_hot)
    return probs


@dataclass(frozen=True)
class _Rows:
    """Rows of logits as the filters look at them; V is of all shards, arrays have its columns."""

    x: Float32[Array, "B ... V"]
    largest: Float32[Array, "B ..."]  # m
    order: threshold_search.Order
    key_bits: int
    weights: tuple[jax.Array, ...]  # the digits of exp((x - m) / T)
    vocab_size: int
    shard: VocabShard

    def mass(self, where: jax.Array) -> exact_sums.Mass:
        """The summed weights of the tokens `where` [..., V] bool."""
        return exact_sums.mass(self.weights, where, self.shard, self.vocab_size)

    def share(self, where: jax.Array) -> jax.Array:
        """The same as float32 [...]."""
        return exact_sums.to_float(self.mass(where), self.vocab_size)

    def last_within(self, reaches: Callable[[jax.Array], jax.Array]) -> threshold_search.LastKept:
        """The last token with fewer than a limit before it: see `threshold_search`."""
        return threshold_search.last_within(
            self.order, self.key_bits, self.vocab_size, reaches, self.shard
        )

    def down_to(self, asked: jax.Array, last: Callable[[], threshold_search.LastKept]) -> jax.Array:
        """The tokens [..., V] bool up to `last()`; all tokens, for nothing, if no slot asked."""
        lowest = -(2 ** (self.key_bits - 1))
        everything = threshold_search.LastKept(
            jnp.full(self.largest.shape, lowest, jnp.int32),
            jnp.full(self.largest.shape, self.vocab_size, jnp.int32),
        )
        everything = vary_like(everything, self.largest)
        return threshold_search.within(self.order, lax.cond(asked, last, lambda: everything))


def _searched(logits: jax.Array, sampling: Sampling, shard: VocabShard) -> Truncation:
    """`truncation` of valid rows of requests that are not greedy; anything in others."""
    rows = _rows(logits, sampling, shard)
    kept = _top_k(rows, sampling)
    kept &= _top_p(rows, kept, sampling)
    kept &= _min_p(rows, sampling)
    kept &= rows.x > -jnp.inf
    return _cut_of(rows, kept, _ids(logits, shard))


def _rows(logits: jax.Array, sampling: Sampling, shard: VocabShard) -> _Rows:
    x = logits.astype(jnp.float32)
    largest = shard.maximum(x)
    vocab_size = shard.size(logits.shape[-1])
    return _Rows(
        x=x,
        largest=largest,
        order=threshold_search.order(logits, _ids(logits, shard)),
        key_bits=8 * logits.dtype.itemsize,
        weights=exact_sums.digits(_weights(x, largest, sampling), vocab_size),
        vocab_size=vocab_size,
        shard=shard,
    )


def _top_k(rows: _Rows, sampling: Sampling) -> jax.Array:
    """The tokens [B, ..., V] bool that top-k keeps."""
    k = _per_row(sampling.top_k, rows.largest)

    def last() -> threshold_search.LastKept:
        return rows.last_within(
            lambda where: (rows.shard.sum(where.astype(jnp.int32)) >= k) & (k > 0)
        )

    return rows.down_to(jnp.any(sampling.top_k > 0), last)


def _top_p(rows: _Rows, kept: jax.Array, sampling: Sampling) -> jax.Array:
    """The tokens that top-p keeps of those that are `kept`; [B, ..., V] bool both."""
    p = _per_row(sampling.top_p, rows.largest)

    def last() -> threshold_search.LastKept:
        wanted = jnp.maximum(p * rows.share(kept), 1e-30)  # never nothing
        limit = exact_sums.at_least(wanted, rows.vocab_size)
        return rows.last_within(
            lambda where: ~exact_sums.less(rows.mass(where & kept), limit) & (p < 1)
        )

    return rows.down_to(jnp.any(sampling.top_p < 1), last)


def _min_p(rows: _Rows, sampling: Sampling) -> jax.Array:
    """The tokens [B, ..., V] bool that min-p keeps."""
    # On logarithms: exp may round so that a smaller logit gets a larger weight.
    lowest = _per_row(sampling.temperature * jnp.log(sampling.min_p), rows.x)
    return rows.x - rows.largest[..., None] >= lowest


def _cut_of(rows: _Rows, kept: jax.Array, ids: jax.Array) -> Truncation:
    """The last of the `kept` tokens [B, ..., V] bool, and log of their share."""
    cut_logit = rows.shard.minimum(jnp.where(kept, rows.x, jnp.inf))
    is_last = kept & (rows.x == cut_logit[..., None])
    log_kept = jnp.log(rows.share(kept) / rows.share(rows.x > -jnp.inf))
    return Truncation(
        cut_logit, rows.shard.maximum(jnp.where(is_last, ids, -1)), jnp.minimum(log_kept, 0.0)
    )


def _choices(
    logits: jax.Array, sampling: Sampling, shard: VocabShard, choice: Greedy | None
) -> tuple[jax.Array, jax.Array]:
    """Each row's greedy token [B, ...] int32, and whether the row is sampled [B, ...] bool.

    A row of a greedy request and an invalid row are not.
    """
    if choice is None:
        choice = greedy(
            logits.reshape(-1, logits.shape[-1]),
            axis_name=shard.axis_name,
            vocab_size=shard.vocab_size,
        )
    token_ids, valid = (x.reshape(logits.shape[:-1]) for x in choice)
    return token_ids, valid & (_per_row(sampling.temperature, valid) > 0)


def _where(rows: jax.Array, a: Truncation, b: Truncation) -> Truncation:
    """The cuts of `a` in the rows [...] bool, those of `b` in the others."""
    chosen: Truncation = jax.tree.map(lambda x, y: jnp.where(rows, x, y), a, b)
    return chosen


def _weights(x: jax.Array, largest: jax.Array, sampling: Sampling) -> jax.Array:
    """exp((x - m) / T) [B, ..., V] float32, with T = 1 where the request is greedy."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled = (x - largest[..., None]) * _per_row(1 / temperature, x)
    # At a huge T, dividing -inf gives 0: a masked token weighs 0 at any T.
    return jnp.where(x > -jnp.inf, exact_sums.exponential(scaled), 0.0)


def _truncates(sampling: Sampling) -> jax.Array:
    """Whether a slot [B] has a filter that can cut."""
    return (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)


def _per_row(values: jax.Array, like: jax.Array) -> jax.Array:
    """Values [B] as [B, 1, ...] with as many axes as `like`."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def _ids(logits: jax.Array, shard: VocabShard) -> jax.Array:
    """The token ids of logits [..., V], broadcast."""
    ids = shard.ids(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.broadcast_to(ids, logits.shape)
