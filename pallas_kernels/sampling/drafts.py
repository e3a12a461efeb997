"""Drafts that are drawn: from the most likely tokens of a draft model's logits.

Whatever q a draft is drawn from, verification makes the emitted tokens the target's. So q is the
draft model's distribution among its `M` most likely tokens alone, and compact: no logits are kept
until the draft is verified, and a residual differs from the target's p in few tokens.

Axes: B slots, D drafts, M tokens of a draft's q, N flat rows, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.greedy import greedy
from pallas_kernels.backends.groups import inverse_temperature
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.meshes.placement import AxisName, Split, VocabShard
from pallas_kernels.meshes.split import on_own_part
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.numbers.random_draws import DRAFT, Source, best, gumbel
from pallas_kernels.sampling import door
from pallas_kernels.sampling.cuts.candidates import cut_among
from pallas_kernels.sampling.parameters import Sampling, has_meaning
from pallas_kernels.sampling.row_read import RowScale
from pallas_kernels.sampling.rows import top_candidates
from pallas_kernels.sampling.types import MOST_TOKENS, CompactQ, Drafts


def draw(
    draft_logits: Float[Array, "B 1 V"] | Float[Array, "N V"],
    sampling: Sampling,
    positions: Int32[Array, " B"],
    *,
    row_ids: Int32[Array, " B"] | None = None,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    vocab_size: int | None = None,
) -> Drafts:
    """Draw drafts as verification expects them: from q, with random numbers of their own.

    q is the distribution among the M most likely tokens after temperature, top-k, top-p and min-p,
    as if there were no others.

    Args:
      draft_logits: the draft model's.
      sampling: each slot's parameters; a greedy slot gets the greedy token, and so does one with a
        NaN for a parameter, which outside of jit is refused.
      positions: the sequence position of each draft.
      row_ids: the logits are flat, [N, V], and this is each slot's row; no row is copied. Outside
        [0, N): the slot has none, and gets the draft -1, which `verify` refuses.
      mesh, axis_name, vocab_size: as `verify` has them.

    Returns:
      One draft a slot (D = 1), with its q; `Drafts.joined` makes a longer proposal.
    """
    draft_logits, sampling, positions, row_ids = door.checked_rows(
        draft_logits, sampling, positions, "draft_logits", row_ids, "[B]"
    )
    how = door.split_of(mesh, axis_name, vocab_size)
    return compiled(_draw, how)(draft_logits, sampling, positions, row_ids)


def _draw(
    how: Split,
    draft_logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    row_ids: jax.Array | None,
) -> Drafts:
    """`draw` of checked arguments."""
    by_slot = sampling, positions, row_ids
    ids, q = on_own_part(_drawn, draft_logits, by_slot, how, by_row=row_ids is None)
    num = jnp.ones_like(positions)
    if row_ids is not None:
        num = ((row_ids >= 0) & (row_ids < draft_logits.shape[0])).astype(jnp.int32)
        ids = jnp.where(num[:, None] > 0, ids, -1)
    return Drafts(ids, num, q)


def _drawn(
    shard: VocabShard,
    draft_logits: jax.Array,
    by_slot: tuple[Sampling, jax.Array, jax.Array | None],
) -> tuple[jax.Array, CompactQ]:
    """`draw` where this device holds the columns of `shard`: ids [B, 1] and q [B, 1, M]."""
    sampling, positions, row_ids = by_slot
    x = draft_logits[:, 0] if row_ids is None else draft_logits

    def greedily() -> tuple[jax.Array, CompactQ]:
        ids = greedy(x, axis_name=shard.axis_name, vocab_size=shard.vocab_size).token_ids
        if row_ids is not None:
            ids = ids[jnp.clip(row_ids, 0, x.shape[0] - 1)]
        first = jnp.arange(min(MOST_TOKENS, shard.size(x.shape[1])), dtype=jnp.int32)[None] == 0
        q_ids = jnp.where(first, ids[:, None], -1)
        log_q = jnp.where(q_ids >= 0, jnp.float32(0), -jnp.inf)
        return ids[:, None], CompactQ(q_ids[:, None], log_q[:, None])

    def by_chance() -> tuple[jax.Array, CompactQ]:
        top = top_candidates(x, MOST_TOKENS, shard, row_ids)
        return _from_candidates(top, sampling, positions, shard.size(x.shape[1]))

    return typed.cond(jnp.any(sampling.temperature > 0), by_chance, greedily)


def _from_candidates(
    top: tuple[jax.Array, jax.Array], sampling: Sampling, positions: jax.Array, vocab_size: int
) -> tuple[jax.Array, CompactQ]:
    """`_drawn` where a slot samples, from each slot's largest logits: ids and logits [B, M]."""
    ids, x = top
    greedy_ids = jnp.maximum(ids[:, 0], 0)  # -1: no logit is a number above -inf
    largest, inverse = x[:, 0], inverse_temperature(sampling.temperature)
    gap = scaled(x, largest[:, None], inverse[:, None])
    total = exact_sums.mass(exponential(gap), vocab_size)
    # The total is that of the candidates: a top-k of more than there are keeps all of them.
    cut, _ = cut_among(ids, x, RowScale(largest, inverse, total), sampling, vocab_size)
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    is_kept = cut.keeps(x, ids) & (ids >= 0)
    log_mass = logarithm(exact_sums.to_float(total, vocab_size)) + cut.log_kept
    log_q = jnp.where(is_kept, jnp.minimum(gap - log_mass[:, None], 0.0), -jnp.inf)

    _, drawn = best(
        jnp.where(is_kept, gap + gumbel(Source(sampling.seed, positions), DRAFT, ids), -jnp.inf),
        ids,
    )
    sampled = (sampling.temperature > 0) & has_meaning(sampling) & jnp.isfinite(largest)
    token_ids = jnp.where(sampled, drawn, greedy_ids)
    one_hot = jnp.where(place == 0, 0.0, -jnp.inf)
    log_q = jnp.where(sampled[:, None], log_q, one_hot)
    q_ids = jnp.where(log_q > -jnp.inf, ids, -1).at[:, 0].set(greedy_ids)
    return token_ids[:, None], CompactQ(q_ids[:, None], log_q[:, None])
