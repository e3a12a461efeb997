"""Verification: which drafts the target model accepts, and the token that follows them.

Greedy requests accept a draft that equals the target's own choice. Sampled ones use rejection
sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): the emitted tokens
follow the target's processed distribution exactly, whatever the drafter proposed.

Axes: B slots, D drafts, S = D + 1 positions, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.device.sampling.distribution import (
    Sampling,
    Truncation,
    processed_probs,
    truncation,
)
from jax_specdec.device.sampling.explicit_axes import on_own_part
from jax_specdec.device.sampling.random_draws import ACCEPT, RECOVER, categorical, keys, uniform
from pallas_kernels import Greedy, VocabShard, greedy

AcceptRule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Drafts(NamedTuple):
    """The tokens that a drafter proposed.

    Each draft was drawn from q: the processed distribution of its `logits` under its slot's
    sampling parameters.
    """

    token_ids: Int32[Array, "B D"]
    num: Int32[Array, " B"]  # at most D
    logits: Float[Array, "B D V"] | None  # the draft model's; None: each draft was certain
    cut: Truncation | None = None  # of q [B, D], as it was drawn; None: found again where needed


class Verified(NamedTuple):
    """The emitted tokens: the accepted drafts, then the recovered or the bonus token."""

    token_ids: Int32[Array, "B S"]  # from num_tokens on: -1
    num_tokens: Int32[Array, " B"]  # from 1 to the number of drafts + 1
    cut: Truncation | None = None  # of the rows' p [B, S], which processed logprobs are of


class _Rows(NamedTuple):
    """The rows to verify, with the parts of the answer that all requests need."""

    logits: Float[Array, "B S V"]
    greedy: Greedy  # [B * S], the rows' choices
    token_ids: Int32[Array, "B S"]  # the same ids
    considered: Bool[Array, "B D"]  # the drafts that verification may reach
    positions: Int32[Array, "B S"]  # the sequence position that each row decides


def accept_draft(
    u: Float32[Array, "*drafts"], p: Float32[Array, "*drafts"], q: Float32[Array, "*drafts"]
) -> Bool[Array, "*drafts"]:
    """Accept with probability min(1, p / q): `u` is uniform in [0, 1).

    The rule is a product and a strict comparison: p = 0 is never accepted, not even at u = 0, and
    p >= q always is.
    """
    return u * q < p


def verify(
    logits: Float[Array, "B S V"],
    drafts: Drafts,
    sampling: Sampling,
    positions: Int32[Array, " B"],
    *,
    accept: AcceptRule = accept_draft,
    choice: Greedy | None = None,
    parallel: Parallel = ONE_DEVICE,
) -> Verified:
    """Verify `drafts` against the target's logits.

    Args:
      logits: S = D + 1; row j predicts the token after drafts 0..j-1.
      drafts: the proposals.
      sampling: each slot's parameters.
      positions: the sequence position of the token that row 0 predicts.
      accept: `(u, p, q) -> bool`; the default preserves the target's distribution.
      choice: the greedy choice of the B * S rows, where it is known already.
      parallel: the devices among which the vocabulary of all logits is split. Without it, logits
        may be split by slots and vocabulary over any mesh with explicit or automatic axes: their
        type or the compiler tells. On the same logits, the emitted tokens are those of one device.

    Returns:
      The emitted tokens. At an invalid row (see `greedy`) verification stops: that row emits its
      greedy token.

    Raises:
      ValueError: the drafts are not one fewer than the rows.
    """
    batch, num_positions, _ = logits.shape
    if drafts.token_ids.shape != (batch, num_positions - 1):
        raise ValueError(
            f"drafts {drafts.token_ids.shape} do not go with logits {logits.shape}: B slots of S "
            f"rows verify [B, S - 1] = {(batch, num_positions - 1)} drafts"
        )

    def on_shard(shard: VocabShard, columns: Any, whole: Any) -> Verified:
        logits, draft_logits = columns
        drafts, sampling, positions, choice = whole
        drafts = drafts._replace(logits=draft_logits)
        return _verify(shard, logits, drafts, sampling, positions, choice, accept)

    columns = (logits, drafts.logits)
    by_slot = (drafts._replace(logits=None), sampling, positions, choice)
    return on_own_part(on_shard, columns, by_slot, parallel)


def _verify(
    shard: VocabShard,
    logits: jax.Array,
    drafts: Drafts,
    sampling: Sampling,
    positions: jax.Array,
    choice: Greedy | None,
    accept: AcceptRule,
) -> Verified:
    """`verify` where this device holds the columns of `shard` of all logits."""
    rows = _rows(shard, logits, drafts, positions, choice)
    is_greedy = sampling.temperature == 0

    def all_greedy() -> Verified:
        return _greedily(rows, drafts)

    def some_sampled() -> Verified:
        chosen, drawn = _greedily(rows, drafts), _sampled(shard, rows, drafts, sampling, accept)
        return Verified(
            jnp.where(is_greedy[:, None], chosen.token_ids, drawn.token_ids),
            jnp.where(is_greedy, chosen.num_tokens, drawn.num_tokens),
            drawn.cut,
        )

    verified: Verified = lax.cond(jnp.all(is_greedy), all_greedy, some_sampled)
    return verified


def _rows(
    shard: VocabShard,
    logits: jax.Array,
    drafts: Drafts,
    positions: jax.Array,
    choice: Greedy | None,
) -> _Rows:
    batch, num_positions, width = logits.shape
    if choice is None:
        choice = greedy(
            logits.reshape(-1, width), axis_name=shard.axis_name, vocab_size=shard.vocab_size
        )
    token_ids, valid = (x.reshape(batch, num_positions) for x in choice)
    index = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
    considered = (index[:, :-1] < drafts.num[:, None]) & valid[:, :-1]
    # An id outside the vocabulary has probability 0 under p and q, as if it were not proposed.
    considered &= (drafts.token_ids >= 0) & (drafts.token_ids < shard.size(width))
    return _Rows(logits, choice, token_ids, considered, positions[:, None] + index)


def _greedily(rows: _Rows, drafts: Drafts) -> Verified:
    """Accept the drafts that equal the greedy choices; then comes the greedy choice."""
    agrees = rows.considered & (drafts.token_ids == rows.token_ids[:, :-1])
    emitted = _emit(agrees, drafts.token_ids, rows.token_ids)
    return emitted._replace(cut=Truncation.greedy(rows.token_ids))


def _sampled(
    shard: VocabShard, rows: _Rows, drafts: Drafts, sampling: Sampling, accept: AcceptRule
) -> Verified:
    """Accept drafts by p and q; then comes a token from what they left of p."""
    cut = truncation(rows.logits, sampling, shard=shard, choice=rows.greedy)
    p = processed_probs(rows.logits, sampling, shard=shard, choice=rows.greedy, cut=cut)
    width, num_drafts = p.shape[-1], drafts.token_ids.shape[1]
    draft_ids = jnp.clip(drafts.token_ids, 0, shard.size(width) - 1)
    p_draft = shard.at(p[:, :num_drafts], draft_ids)
    if drafts.logits is None:
        own = jnp.broadcast_to(shard.ids(width)[None, None], p[:, :num_drafts].shape)
        q = (own == draft_ids[..., None]).astype(jnp.float32)
    else:
        q = processed_probs(drafts.logits, sampling, shard=shard, cut=drafts.cut)
    q_draft = shard.at(q, draft_ids)
    seeds = jnp.broadcast_to(sampling.seed[:, None], rows.positions.shape)
    u = uniform(keys(seeds, rows.positions, ACCEPT)[:, :num_drafts])
    accepted = rows.considered & accept(u, p_draft, q_draft)
    a = _leading(accepted)
    last = _residual(shard, rows, p, q, a)
    next_ids = categorical(
        keys(sampling.seed, rows.positions[:, 0] + a, RECOVER), last, shard=shard
    )
    next_ids = jnp.broadcast_to(next_ids[:, None], rows.token_ids.shape)
    return _emit(accepted, drafts.token_ids, next_ids)._replace(cut=cut)


def _residual(
    shard: VocabShard,
    rows: _Rows,
    p: Float32[Array, "B S V"],
    q: Float32[Array, "B D V"],
    a: Int32[Array, " B"],
) -> Float32[Array, "B V"]:
    """Weights of the token after `a` accepted drafts: max(p - q, 0) after a rejection, else p.

    Past the proposals and at an invalid row there is no q to subtract.
    """
    last = a[:, None, None]
    p_last = jnp.take_along_axis(p, last, axis=1)[:, 0]
    q_last = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), last, axis=1)[:, 0]
    rejected = jnp.take_along_axis(jnp.pad(rows.considered, ((0, 0), (0, 1))), a[:, None], axis=1)
    residual = jnp.where(rejected, jnp.maximum(p_last - q_last, 0.0), p_last)
    # Rounding can leave nothing of a residual whose p and q are equal: then p is the answer.
    return jnp.where(shard.any(residual > 0)[:, None], residual, p_last)


def _leading(accepted: Bool[Array, "B D"]) -> Int32[Array, " B"]:
    """How many leading entries of each slot are true."""
    return jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _emit(
    accepted: Bool[Array, "B D"], draft_ids: Int32[Array, "B D"], next_ids: Int32[Array, "B S"]
) -> Verified:
    """The leading accepted drafts, then the one of `next_ids` of the row where they end."""
    a = _leading(accepted)
    index = jnp.arange(next_ids.shape[1], dtype=jnp.int32)[None, :]
    padded = jnp.pad(draft_ids, ((0, 0), (0, 1)))
    token_ids = jnp.where(index < a[:, None], padded, jnp.where(index == a[:, None], next_ids, -1))
    return Verified(token_ids, a + 1)
