"""Raw logprobs of rows that were read to sample from them, without a second read."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.backends import sampled_draw
from pallas_kernels.backends.answers import RowStatistics, finish
from pallas_kernels.backends.xla import groups
from pallas_kernels.backends.xla.rows import chosen_logits
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted


def logprobs_of_read(
    logits: Float[Array, "N V"],
    token_ids: Int32[Array, " N"],
    top_ids: Int32[Array, "N K"],
    top_logits: Float32[Array, "N K"],
    maximum: Float32[Array, " N"],
    sum_exp: Float32[Array, " N"],
    maxima: Float32[Array, "N G"],
) -> TopkLogprobs:
    """`topk_logprobs(logits, token_ids, K)` from what a read has left.

    A token that is among the row's top K has its rank from them; for the others, and for those
    alone, the row's larger logits are counted.

    Args:
      logits: the rows, whole.
      token_ids: one of each row; -1 where none is wanted.
      top_ids, top_logits: the row's top K.
      maximum: m.
      sum_exp: of exp(x - m); NaN where the row is invalid.
      maxima: of the rows' groups.
    """
    x = chosen_logits(logits, token_ids[:, None]).astype(jnp.float32)
    larger = (top_logits > x).sum(axis=1, dtype=jnp.int32)
    wanted = (token_ids >= 0) & ~jnp.isnan(sum_exp)
    k = top_ids.shape[1]
    uncounted = wanted & ((larger == k) if k else True)
    some = jnp.where(uncounted, token_ids, -1)
    counted = sampled_draw.num_larger(logits, maxima, some, _num_larger)
    larger = jnp.where(uncounted, counted, larger)
    everything = jnp.ones(len(token_ids), bool)
    named = jnp.concatenate([x, top_logits], axis=1)
    statistics = RowStatistics(maximum, sum_exp, larger)
    return finish(
        Wanted(k), logits.shape[1], statistics, token_ids, named, top_ids, everything, None
    )


def _num_larger(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """How many logits of each row are larger than its token's: of the rows that have one."""
    there = token_ids >= 0
    index = jnp.argsort(~there, stable=True).astype(jnp.int32)
    number = there.sum(dtype=jnp.int32)
    x = chosen_logits(logits, token_ids[:, None]).astype(jnp.float32)
    counted = groups.num_larger(logits, x[index, 0], index, number)
    place = jnp.where(jnp.arange(len(index), dtype=jnp.int32) < number, index, len(index))
    return jnp.zeros_like(token_ids).at[place].set(counted, mode="drop")
