"""What verification takes of a q over the whole vocabulary, and the token after a refusal.

Of each draft its own entry is looked up. A row whose draft is refused is read once more with its q,
and a token is drawn from max(p - q, 0) in two steps, as `row_draws` draws from p: a group of 256
tokens by the logarithm of its sum, then a token in it. Each group is summed in one order, by the
device that has it, so the tokens are the same on every split of the vocabulary.

Axes: B slots, D drafts, Q rows of q, L groups of this device, W = 256 tokens of a group.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.groups import Drawn, inverse_temperature, keeps
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.backends.xla.group_sums import added
from pallas_kernels.lowering.forms import compacted, vary_like
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.random_draws import GROUP, RECOVER, Source, best, gumbel, log_of
from pallas_kernels.sampling import row_read
from pallas_kernels.sampling.parameters import Sampling, Truncation, at_rows
from pallas_kernels.sampling.row_draws import draws_of_all_shards
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.sampling.types import DenseQ, slots_of_rows


class QScale(NamedTuple):
    """What the probabilities of a row of logits are relative to."""

    largest: Float32[Array, "*rows"]
    inverse: Float32[Array, "*rows"]  # 1 / T
    log_total: Float32[Array, "*rows"]


class DraftQ(NamedTuple):
    """The q of B x D drafts, and their rows among those of this device."""

    shard: VocabShard  # of the values' columns
    form: str
    values: jax.Array  # [Q, C] of any form
    rows: Annotated[GroupedRows, "N = Q"]  # the same by groups
    row_ids: Int32[Array, "B D"]
    token_ids: Int32[Array, "B D"]
    scale: Annotated[QScale | None, "*rows = Q"]  # of logits: of each row
    is_certain: Bool[Array, " B"] | None  # of logits: the slots whose drafts were

    @classmethod
    def of(cls, shard: VocabShard, q: DenseQ, token_ids: Int32[Array, "B D"]) -> "DraftQ":
        """The q of these drafts where this device holds the columns of `shard`."""
        batch, num_drafts = token_ids.shape
        values = q.values.reshape(-1, q.values.shape[-1])
        if q.row_ids is None:
            row_ids = jnp.arange(batch * num_drafts, dtype=jnp.int32).reshape(token_ids.shape)
        else:
            row_ids = jnp.clip(q.row_ids, 0, values.shape[0] - 1)
        rows = GroupedRows.of(values, shard)
        scale = is_certain = None
        if q.form == "logits":
            temperature = q.temperature
            assert isinstance(temperature, jax.Array)
            # NaN: no draft of the slot has a probability, and all are accepted or refused by p.
            is_certain = temperature <= 0
            slots = slots_of_rows(row_ids, values.shape[0])
            of_rows = jnp.concatenate([temperature, jnp.ones(1, jnp.float32)])[slots]
            read = row_read.read_sampled_rows(
                rows, Sampling.of(values.shape[0], temperature=of_rows)
            )
            scale = QScale(read.largest, inverse_temperature(of_rows), read.log_total)
        return cls(shard, q.form, values, rows, row_ids, token_ids, scale, is_certain)

    def drafted(self) -> Float32[Array, "B D"]:
        """The probability of each draft; 0 of what is no token."""
        rows = self.row_ids.reshape(-1)
        ids = self.token_ids.reshape(-1, 1)
        x = self.shard.named_logits(self.values, rows, ids)[:, 0]
        scale = None if self.scale is None else at_rows(rows, self.scale)
        probs = self._probs(x, scale).reshape(self.token_ids.shape)
        if self.is_certain is None:
            return probs
        return jnp.where(self.is_certain[:, None], jnp.float32(1), probs)

    def pin_to_iteration(self, of: jax.Array) -> "DraftQ":
        """The same as `GroupedRows.pin_to_iteration`: no loop's program widens all of q first."""
        return self._replace(rows=self.rows.pin_to_iteration(of))

    def of_draft(
        self, slot: Int32[Array, ""], draft: Int32[Array, ""]
    ) -> list[tuple[jax.Array, jax.Array]]:
        """The probabilities that one draft had, and their ids, as the pieces of its row."""
        row = self.row_ids[slot, draft]
        scale = None if self.scale is None else jax.tree.map(lambda x: x[row], self.scale)
        pieces = [(self._probs(x, scale), ids) for x, ids in self.rows.row(row)]
        if self.is_certain is None:
            return pieces
        certain, token_id = self.is_certain[slot], self.token_ids[slot, draft]
        return [
            (jnp.where(certain, (ids == token_id).astype(jnp.float32), probs), ids)
            for probs, ids in pieces
        ]

    def _probs(self, x: jax.Array, scale: QScale | None) -> jax.Array:
        """The probabilities of values, each with the scale of its row; NaN is 0."""
        if self.form == "probs":
            return jnp.where(x > 0, x, jnp.float32(0))
        if scale is not None:
            x = scaled(x, scale.largest, scale.inverse) - scale.log_total
        return jnp.where(x > -jnp.inf, exponential(jnp.minimum(x, jnp.float32(0))), jnp.float32(0))


class Target(NamedTuple):
    """What is known of each slot's rows of p: arrays [B, ...], by slot and position if not of B."""

    rows: jax.Array  # their places among all rows
    cut: Truncation
    scale: QScale


def _residual(
    logits: GroupedRows,
    q: DraftQ,
    target: Target,
    slot: Int32[Array, ""],
    draft: Int32[Array, ""],
    weight: Float32[Array, ""],
) -> list[tuple[jax.Array, jax.Array]]:
    """max(p - q / w, 0) of one row, and the ids, in pieces [groups, W]; target: of scalars."""
    log_mass = target.scale.log_total + target.cut.log_kept

    def probs(x: jax.Array, ids: jax.Array) -> jax.Array:
        log_p = scaled(x, target.scale.largest, target.scale.inverse) - log_mass
        is_kept = keeps(x, ids, target.cut.cut_logit, target.cut.cut_id)
        p = exponential(jnp.minimum(log_p, jnp.float32(0)))
        return jnp.where(is_kept, p, jnp.float32(0))

    pinned, pinned_q = logits.pin_to_iteration(slot), q.pin_to_iteration(slot)
    pieces = zip(pinned.row(target.rows), pinned_q.of_draft(slot, draft), strict=True)
    factor = 1 / weight

    def residual(x: jax.Array, ids: jax.Array, q_probs: jax.Array) -> jax.Array:
        # A minimum that changes nothing, but after which no compiler contracts the product.
        scaled_q = jnp.minimum(q_probs * factor, jnp.float32(3e38))
        return jnp.maximum(probs(x, ids) - scaled_q, jnp.float32(0))

    return [(residual(x, ids, q_probs), ids) for (x, ids), (q_probs, _) in pieces]


def draw_residual(
    logits: GroupedRows,
    q: DraftQ,
    target: Target,
    place: Int32[Array, " B"],
    prefix_weight: Float32[Array, " B"],
    rejected: Bool[Array, " B"],
    source: Source,
    *,
    otherwise: Int32[Array, " B"],
) -> Int32[Array, " B"]:
    """A token of each slot: of max(w p - q, 0) where it refused a draft.

    Args:
      logits: the rows.
      q: of the drafts.
      target: [B], the row of the refused draft.
      place: which of its drafts each slot refused.
      prefix_weight: w; 1 where drafts are verified one by one.
      rejected: the slots that refused one.
      source: [B], of the random numbers.
      otherwise: the tokens of the other slots, and of those where rounding leaves nothing of p.
    """
    order, number = compacted(rejected)
    groups = logits.numbers()[None]

    def draw_for(index: jax.Array, drawn: Drawn) -> Drawn:
        slot = order[index]
        its_target = jax.tree.map(lambda x: x[slot], target)
        pieces = _residual(logits, q, its_target, slot, place[slot], prefix_weight[slot])
        its_source = Source(source.seed[slot][None], source.position[slot][None])
        sums = jnp.concatenate([added(residual) for residual, _ in pieces])
        score, group = best(log_of(sums)[None] + gumbel(its_source, GROUP, groups), groups)
        local = jnp.clip(group[0] - logits.first, 0, logits.num_local - 1)
        weights, ids = _group_of(pieces, local)
        noise = gumbel(its_source, RECOVER, ids[None])
        _, token_id = best(log_of(weights)[None] + noise, ids[None])
        return Drawn(drawn.score.at[slot].set(score[0]), drawn.token_ids.at[slot].set(token_id[0]))

    no_draw = Drawn(jnp.full(rejected.shape, -jnp.inf, jnp.float32), otherwise)
    inputs = logits.logits, q.rows.logits, target, place, prefix_weight, rejected
    draws = lax.fori_loop(0, number, draw_for, vary_like(no_draw, inputs))
    draws = draws_of_all_shards(logits, draws)
    return jnp.where(rejected & (draws.score > -jnp.inf), draws.token_ids, otherwise)


def _group_of(
    pieces: list[tuple[jax.Array, jax.Array]], local: Int32[Array, ""]
) -> tuple[jax.Array, jax.Array]:
    """The weights and ids [W] of one of this device's groups."""
    first = pieces[0][0].shape[0]
    weights, ids = (x[jnp.minimum(local, first - 1)] for x in pieces[0])
    if len(pieces) == 1:
        return weights, ids
    last_weights, last_ids = (x[jnp.maximum(local - first, 0)] for x in pieces[1])
    is_last = local >= first
    return jnp.where(is_last, last_weights, weights), jnp.where(is_last, last_ids, ids)


def residual_masses(
    logits: GroupedRows,
    q: DraftQ,
    target: Target,
    prefix_weight: Float32[Array, "B D"],
    needed: Bool[Array, "B D"],
) -> Float32[Array, "B D"]:
    """The sums of max(w p - q, 0) over the vocabulary where they are needed, else 0.

    The same bits on every split of the vocabulary: groups are summed in one order, and their sums
    as whole numbers.

    Args:
      logits, q: as `draw_residual` has them.
      target: [B, D], the rows that the drafts are compared with.
      prefix_weight: w of each.
      needed: which.
    """
    num_drafts = needed.shape[1]
    order, number = compacted(needed.reshape(-1))
    vocab_size = logits.vocab_size
    num_digits = exact_sums.num_digits(vocab_size)

    def sum_of(index: jax.Array, digits: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = order[index]
        slot, draft = at // num_drafts, at % num_drafts
        its_target = jax.tree.map(lambda x: x[slot, draft], target)
        pieces = _residual(logits, q, its_target, slot, draft, prefix_weight[slot, draft])
        sums = jnp.concatenate([added(residual) for residual, _ in pieces])
        parts = exact_sums.digits(jnp.minimum(sums, jnp.float32(1))[None], vocab_size)
        return tuple(
            digit.at[at].set(part.sum(dtype=jnp.int32))
            for digit, part in zip(digits, parts, strict=True)
        )

    zeros = jnp.zeros(needed.size, jnp.int32)
    inputs = logits.logits, q.rows.logits, target, prefix_weight, needed
    start = tuple(vary_like(zeros, inputs) for _ in range(num_digits))
    digits = lax.fori_loop(0, number, sum_of, start)
    total = exact_sums.of_sums(tuple(map(logits.shard.across_sum, digits)), vocab_size)
    return prefix_weight * exact_sums.to_float(total, vocab_size).reshape(needed.shape)
