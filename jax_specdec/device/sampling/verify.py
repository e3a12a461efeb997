"""Verification: which drafts the target model accepts, and the token that follows them.

Greedy requests accept a draft that equals the target's own choice. Sampled ones use rejection
sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): the emitted tokens
follow the target's processed distribution exactly, whatever the drafter proposed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.device.sampling.distribution import (
    Sampling,
    Truncation,
    processed_probs,
    truncation,
)
from jax_specdec.device.sampling.random_draws import ACCEPT, RECOVER, categorical, keys, uniform
from jax_specdec.wording import counted
from pallas_kernels import Greedy, VocabShard, greedy

AcceptRule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Drafts(NamedTuple):
    """What a drafter proposed. Axes: B slots, D drafts, V vocabulary.

    Each draft was drawn from q: the processed distribution of its `logits` under its slot's
    sampling parameters.
    """

    token_ids: jax.Array  # [B, D] int32
    num: jax.Array  # [B] int32, at most D
    logits: jax.Array | None  # [B, D, V] float, the draft model's; None: each draft was certain
    cut: Truncation | None = None  # [B, D], of q, as it was drawn; None: found again where needed


class Verified(NamedTuple):
    """The emitted tokens: the accepted drafts, then the recovered or the bonus token."""

    token_ids: jax.Array  # [B, S] int32; from num_tokens on: -1
    num_tokens: jax.Array  # [B] int32, from 1 to num_drafts + 1
    cut: Truncation | None = None  # [B, S], of the rows' p, which processed logprobs are of


def accept_draft(u: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Accept with probability min(1, p / q): `u` is uniform in [0, 1).

    Written as a product, strictly: p = 0 is never accepted, not even at u = 0, and p >= q always.
    """
    return u * q < p


def verify(
    logits: jax.Array,
    drafts: Drafts,
    sampling: Sampling,
    positions: jax.Array,
    *,
    accept: AcceptRule = accept_draft,
    choice: Greedy | None = None,
    parallel: Parallel = ONE_DEVICE,
) -> Verified:
    """Verify `drafts` against the target's logits.

    Args:
      logits: [B, S, V] float, S = D + 1; row j predicts the token after drafts 0..j-1.
      drafts: the proposals [B, D].
      sampling: each slot's parameters.
      positions: [B] int32, the sequence position of the token that row 0 predicts.
      accept: `(u, p, q) -> bool`; the default preserves the target's distribution.
      choice: the greedy choice of the [B * S] rows, where it is known already.
      parallel: the devices among which the vocabulary of all logits is split. On the same logits,
        the emitted tokens are those of one device.

    Returns:
      The emitted tokens. At an invalid row (see `greedy`) verification stops: that row emits its
      greedy token.
    """
    batch, num_positions, _ = logits.shape
    if drafts.token_ids.shape != (batch, num_positions - 1):
        raise ValueError(
            f"drafts {drafts.token_ids.shape} do not go with logits {logits.shape}: "
            f"for {counted(num_positions, 'row')} a slot there are "
            f"{counted(num_positions - 1, 'draft')} to verify"
        )

    def on_shard(shard: VocabShard, columns: Any, whole: Any) -> Verified:
        logits, draft_logits = columns
        drafts, sampling, positions, choice = whole
        drafts = drafts._replace(logits=draft_logits)
        return _verify(shard, logits, drafts, sampling, positions, choice, accept)

    return parallel.over_vocabulary(
        on_shard,
        (logits, drafts.logits),
        (drafts._replace(logits=None), sampling, positions, choice),
    )


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
    batch, num_positions, width = logits.shape
    num_drafts = num_positions - 1
    if choice is None:
        choice = greedy(
            logits.reshape(-1, width), axis_name=shard.axis_name, vocab_size=shard.vocab_size
        )
    choice = Greedy(*(x.reshape(batch, num_positions) for x in choice))
    index = jnp.arange(num_positions, dtype=jnp.int32)[None, :]
    considered = (index[:, :num_drafts] < drafts.num[:, None]) & choice.valid[:, :num_drafts]
    # What is no token has probability 0 under p and under q: as if it had not been proposed.
    considered &= (drafts.token_ids >= 0) & (drafts.token_ids < shard.size(width))
    is_greedy = sampling.temperature == 0

    def greedily() -> Verified:
        agrees = considered & (drafts.token_ids == choice.token_ids[:, :num_drafts])
        emitted = _emit(agrees, drafts.token_ids, choice.token_ids)
        return emitted._replace(cut=Truncation.greedy(choice.token_ids))

    def sampled() -> Verified:
        cut = truncation(logits, sampling, shard=shard, choice=choice)
        p = processed_probs(logits, sampling, shard=shard, choice=choice, cut=cut)
        draft_ids = jnp.clip(drafts.token_ids, 0, shard.size(width) - 1)
        p_draft = shard.at(p[:, :num_drafts], draft_ids)
        if drafts.logits is None:
            own = jnp.broadcast_to(shard.ids(width)[None, None], p[:, :num_drafts].shape)
            q = (own == draft_ids[..., None]).astype(jnp.float32)
        else:
            q = processed_probs(drafts.logits, sampling, shard=shard, cut=drafts.cut)
        q_draft = shard.at(q, draft_ids)
        all_positions = positions[:, None] + index
        seeds = jnp.broadcast_to(sampling.seed[:, None], all_positions.shape)
        u = uniform(keys(seeds, all_positions, ACCEPT)[:, :num_drafts])
        accepted = considered & accept(u, p_draft, q_draft)
        a = _leading(accepted)
        # The next token comes from the residual max(p - q, 0) after a rejection, else from p.
        # Past the proposals (and at an invalid row) there is no q to subtract.
        last = jnp.minimum(a, num_drafts)[:, None, None]
        p_last = jnp.take_along_axis(p, last, axis=1)[:, 0]
        q_all = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
        q_last = jnp.take_along_axis(q_all, last, axis=1)[:, 0]
        row_considered = jnp.pad(considered, ((0, 0), (0, 1)))
        rejected = jnp.take_along_axis(row_considered, a[:, None], axis=1)
        residual = jnp.where(rejected, jnp.maximum(p_last - q_last, 0.0), p_last)
        # Rounding can leave nothing of a residual whose p and q are equal: then p is the answer.
        residual = jnp.where(shard.any(residual > 0)[:, None], residual, p_last)
        next_ids = categorical(keys(sampling.seed, positions + a, RECOVER), residual, shard=shard)
        next_ids = jnp.broadcast_to(next_ids[:, None], choice.token_ids.shape)
        drawn = _emit(accepted, drafts.token_ids, next_ids)
        chosen = greedily()
        return Verified(
            jnp.where(is_greedy[:, None], chosen.token_ids, drawn.token_ids),
            jnp.where(is_greedy, chosen.num_tokens, drawn.num_tokens),
            cut,
        )

    verified: Verified = lax.cond(jnp.all(is_greedy), greedily, sampled)
    return verified


def _leading(accepted: jax.Array) -> jax.Array:
    """How many leading entries of [B, D] are true. [B] int32."""
    return jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _emit(accepted: jax.Array, draft_ids: jax.Array, next_ids: jax.Array) -> Verified:
    """The leading accepted drafts, then `next_ids` [B, S] of the row where they end."""
    a = _leading(accepted)
    index = jnp.arange(next_ids.shape[1], dtype=jnp.int32)[None, :]
    padded = jnp.pad(draft_ids, ((0, 0), (0, 1)))
    token_ids = jnp.where(index < a[:, None], padded, jnp.where(index == a[:, None], next_ids, -1))
    return Verified(token_ids, a + 1)
