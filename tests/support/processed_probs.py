"""The processed distribution of rows, written out: sampling itself never makes it."""

import jax.numpy as jnp

from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.meshes.placement import WHOLE
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.sampling import parameters, row_read
from pallas_kernels.sampling.distribution import truncation
from pallas_kernels.sampling.rows import GroupedRows


def processed_probs(logits, sampling, *, shard=WHOLE):
    """The probabilities [B, ..., V] that the cut of logits [B, ..., V] keeps, which sum to 1.

    The sum is over all shards; the arguments are those of `truncation`.
    """
    shape, width = logits.shape[:-1], logits.shape[-1]
    cut = truncation(logits, sampling, shard=shard)
    x = shard.masked(logits).astype(jnp.float32)
    ids = jnp.broadcast_to(shard.ids(width), logits.shape)
    each = parameters.of_each_row(sampling, shape)
    rows = GroupedRows.of(logits.reshape(-1, width), shard)
    found = row_read.read_sampled_rows(rows, each)
    one_hot = (cut.cut_logit == jnp.inf)[..., None]  # greedy requests and invalid rows

    def per_row(values):
        return values.reshape(*shape, 1)

    gap = scaled(x, per_row(found.largest), per_row(found.inverse))
    log_mass = per_row(found.log_total) + cut.log_kept[..., None]
    probs = exponential(jnp.minimum(gap - log_mass, 0.0))
    return jnp.where(cut.keeps(x, ids), jnp.where(one_hot, 1.0, probs), 0.0)
