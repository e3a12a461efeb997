"""The distribution that a request's tokens are drawn from.

`row_draws.py` draws from it, with random numbers that are functions of (request seed, position of
the token that they decide, purpose) and of nothing else.

Axes: B slots, `*rows` what lies between slot and vocabulary (often S positions), V vocabulary,
N = B * ... all rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.backends.greedy import greedy
from pallas_kernels.backends.groups import MANY as MANY_CANDIDATES
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.rows import check_floats
from pallas_kernels.contract.types import Greedy
from pallas_kernels.lowering import forms, typed
from pallas_kernels.lowering.forms import compacted, map_blocks, scattered, vary_like
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.meshes.placement import WHOLE, VocabShard
from pallas_kernels.sampling import door, parameters, row_read
from pallas_kernels.sampling.cuts import search
from pallas_kernels.sampling.cuts.candidates import cut_among
from pallas_kernels.sampling.parameters import Sampling, Truncation, at_rows
from pallas_kernels.sampling.row_read import RowScale, RowSummary
from pallas_kernels.sampling.rows import GroupedRows

# Rows that are searched at a time; of long ones fewer: a GPU's program keeps 20 bytes a token.
SEARCHED_ROWS, SEARCHED_TOKENS = 16, 2 * 152_064


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
    or no finite logit, a NaN for a parameter) keep the greedy token alone, with log_kept 0.

    The result is the same, bit for bit, for every number of vocabulary shards. Against exact
    arithmetic, log_kept is off by at most 2e-6, and a top-p or min-p boundary by no more than
    moving top_p or min_p by 2e-6 of itself would do, plus the error of the float32 weights.

    Args:
      logits: bfloat16, float16 or float32; on a vocabulary shard, its columns.
      sampling: each slot's parameters.
      shard: the columns of each row that this device holds.
      choice: the greedy choice of all B * ... rows, where it is known already.
    """
    door.check_shard(shard)
    logits = check_floats("logits", logits)
    if logits.ndim < 2 or 0 in logits.shape:
        raise ValueError(f"logits {logits.shape}: give [B, ..., V], 1 and more of each axis")
    sampling = door.sampling_of(sampling, logits.shape[0], f"logits {logits.shape}")
    return compiled(_truncation, shard)(logits, sampling, choice)


def _truncation(
    shard: VocabShard, logits: jax.Array, sampling: Sampling, choice: Greedy | None
) -> Truncation:
    """`truncation` of this device's columns."""
    logits, shard = shard.without_padding(logits)
    shape, width = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(-1, width)
    if choice is None:
        choice = greedy(flat, axis_name=shard.axis_name, vocab_size=shard.vocab_size)
    row_sampling = parameters.of_each_row(sampling, shape)
    sampled = choice.valid & parameters.has_meaning(row_sampling) & (row_sampling.temperature > 0)
    vocab_size = shard.size(width)

    def sampled_cuts() -> Truncation:
        rows = GroupedRows.of(flat, shard)
        return cuts(rows, row_read.read_sampled_rows(rows, row_sampling), row_sampling, sampled)

    def no_cuts() -> Truncation:
        return vary_like(Truncation.nothing((flat.shape[0],), vocab_size), choice)

    # A batch that cuts nothing pays for nothing.
    cut = lax.cond(jnp.any(sampled & parameters.truncates(row_sampling)), sampled_cuts, no_cuts)
    cut = parameters.where(sampled, cut, Truncation.greedy(choice.token_ids))
    # All of it is computed: where a part alone was used, jaxlib's StableHLO passes crashed.
    return forms.barrier(typed.tree_map(lambda x: x.reshape(shape), cut))


def cuts(
    rows: GroupedRows, read: RowSummary, sampling: Sampling, sampled: Bool[Array, " N"]
) -> Truncation:
    """The cuts [N] of the sampled rows; those of others keep everything.

    The read's candidates settle most rows. Those that are left, and these alone, take a search of
    whole rows.

    Args:
      rows: the logits.
      read: their read.
      sampling: of each row [N].
      sampled: the valid rows of requests that are not greedy.
    """
    is_cut = sampled & parameters.truncates(sampling)
    no_cut = vary_like(Truncation.nothing(is_cut.shape, rows.vocab_size), is_cut)

    def some() -> Truncation:
        cut, settled = cut_among(
            read.top_ids,
            read.top_logits,
            read.scale,
            sampling,
            rows.vocab_size,
            jnp.maximum(read.num_candidates, 1),
        )
        cut = parameters.where(is_cut & settled, cut, no_cut)
        if rows.vocab_size <= MANY_CANDIDATES:
            return cut  # all tokens are candidates
        unsettled = is_cut & ~settled
        search = functools.partial(_with_searched, rows, read.scale, sampling)

        def leave(_: jax.Array, cut: Truncation) -> Truncation:
            return cut

        return typed.cond(jnp.any(unsettled), search, leave, unsettled, cut)

    return typed.cond(jnp.any(is_cut), some, lambda: no_cut)


def _with_searched(
    rows: GroupedRows, scale: RowScale, sampling: Sampling, unsettled: jax.Array, cut: Truncation
) -> Truncation:
    """The cuts with those of the rows that are `unsettled` [N] bool, some of them at a time."""
    index, number = compacted(unsettled)
    block = index.shape[0]
    if isinstance(block, int):  # a symbolic number of rows is one block
        fitting = SEARCHED_TOKENS // rows.logits.shape[1]
        block = min(max(fitting, 1), SEARCHED_ROWS, block)
    shard = VocabShard(rows.shard.axis_name, rows.vocab_size)

    def work(start: jax.Array) -> Truncation:
        begin = jnp.minimum(start, index.shape[0] - block)  # of the last block, which begins early
        there = lax.dynamic_slice_in_dim(index, begin, block)
        x = forms.block_of_logits(rows.logits, there, start, block)
        x = of_logits.apply(x, of_logits.of_rows(rows.changes, there))
        its_scale, its_sampling = at_rows(there, (scale, sampling))
        is_unsettled = begin + jnp.arange(block, dtype=jnp.int32) < number
        return search.searched(forms.barrier(x), its_sampling, its_scale, shard, is_unsettled)

    no_cut = Truncation.nothing(index.shape, rows.vocab_size)
    inputs = (cut, unsettled, scale, sampling)
    return scattered(cut, map_blocks(work, block, number, no_cut, inputs), index, number)
