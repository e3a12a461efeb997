"""A token of what a dense q leaves of p: of max(p - q, 0), of the rows that refuse a draft.

Every token competes with noise of its own (Gumbel-max), a function of its id: so the token that is
drawn is the same on every split of the vocabulary. One row after another is read, and only those.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.backends.groups import Drawn, keeps
from pallas_kernels.contract.changes import apply, of_rows
from pallas_kernels.lowering.forms import vary_like
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.random_draws import RECOVER, Source, best, gumbel, log_of
from pallas_kernels.sampling.parameters import compacted
from pallas_kernels.sampling.row_draws import Drawing, of_all_shards
from pallas_kernels.sampling.row_read import scaled
from pallas_kernels.sampling.rows import GroupedRows


def draw(
    logits: GroupedRows,
    drawing: Drawing,
    probs: Float[Array, "_ C"],
    row_of_q: Int32[Array, " B"],
    rejected: Bool[Array, " B"],
    *,
    otherwise: Int32[Array, " B"],
) -> Int32[Array, " B"]:
    """A token of each slot's row.

    Args:
      logits: the rows.
      drawing: those of them that are drawn from, with no tokens taken out.
      probs: this device's columns of all q.
      row_of_q: the q of the draft that each slot refused.
      rejected: the slots that refused one.
      otherwise: the tokens of the other slots, and of those where rounding leaves nothing of p.
    """
    which = rejected & drawing.sampled
    order, number = compacted(which)
    width = logits.logits.shape[1]
    ids = logits.shard.ids(width)[None].astype(jnp.int32)

    def one(index: jax.Array, drawn: Drawn) -> Drawn:
        at = lax.dynamic_slice_in_dim(order, index, 1)
        own: Drawing = jax.tree.map(lambda x: x[at], drawing)
        x = lax.dynamic_slice_in_dim(logits.logits, own.rows[0], 1)
        x = apply(x, of_rows(logits.changes, own.rows)).astype(jnp.float32)
        kept = keeps(x, ids, own.cut.cut_logit[:, None], own.cut.cut_id[:, None])
        log_mass = (own.log_total + own.cut.log_kept)[:, None]
        log_p = scaled(x, own.largest[:, None], own.inverse[:, None]) - log_mass
        p = jnp.where(kept, exponential(jnp.minimum(log_p, 0.0)), 0.0)
        q = lax.dynamic_slice_in_dim(probs, row_of_q[at[0]], 1).astype(jnp.float32)
        left = jnp.maximum(p - jnp.where(q > 0, q, 0.0), 0.0)
        noise = gumbel(Source(own.source.seed, own.source.position), RECOVER, ids)
        score, token_id = best(jnp.where(left > 0, log_of(left) + noise, -jnp.inf), ids)
        return Drawn(drawn.score.at[at].set(score), drawn.token_ids.at[at].set(token_id))

    nothing = Drawn(jnp.full(which.shape[0], -jnp.inf, jnp.float32), otherwise)
    start = vary_like(nothing, (logits.logits, probs, drawing, row_of_q))
    found = of_all_shards(logits, lax.fori_loop(0, number, one, start))
    return jnp.where(which & (found.score > -jnp.inf), found.token_ids, otherwise)
