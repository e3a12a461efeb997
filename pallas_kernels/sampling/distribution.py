"""The distribution that a request's tokens are drawn from.

`row_draws.py` draws from it, with random numbers that are functions of (request seed, position of
the token that they decide, purpose) and of nothing else.

Axes: B slots, `*rows` what lies between slot and vocabulary (often S positions), V vocabulary,
N = B * ... all rows.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.backends.greedy import greedy
from pallas_kernels.backends.groups import MANY as MANY_CANDIDATES
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.rows import check_floats
from pallas_kernels.contract.types import Greedy
from pallas_kernels.lowering import forms
from pallas_kernels.lowering.forms import compacted, map_blocks, scattered, vary_like
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.meshes.placement import WHOLE, VocabShard
from pallas_kernels.sampling import cut_search, door, parameters, row_cuts, row_read
from pallas_kernels.sampling.parameters import Sampling, Truncation, at_rows
from pallas_kernels.sampling.row_read import RowRead, RowScale
from pallas_kernels.sampling.rows import GroupedRows

MOST_CANDIDATES = 1024  # of a row; one that keeps more takes the search
ROWS_WITH_MORE = 256  # with so many candidates at a time


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
    return compiled(_truncation, shard)(logits, sampling, choice)  # type: ignore[no-any-return]


def _truncation(
    shard: VocabShard, logits: jax.Array, sampling: Sampling, choice: Greedy | None
) -> Truncation:
    """`truncation` of this device's columns."""
    logits, shard = shard.without_padding(logits)
    shape, width = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(-1, width)
    if choice is None:
        choice = greedy(flat, axis_name=shard.axis_name, vocab_size=shard.vocab_size)
    each = parameters.of_each_row(sampling, shape)
    sampled = choice.valid & parameters.has_meaning(each) & (each.temperature > 0)
    vocab_size = shard.size(width)

    def found() -> Truncation:
        rows = GroupedRows.of(flat, shard)
        return cuts(rows, row_read.read(rows, each), each, sampled)

    def nothing() -> Truncation:
        return vary_like(Truncation.nothing((flat.shape[0],), vocab_size), choice)

    # A batch that cuts nothing pays for nothing.
    cut = lax.cond(jnp.any(sampled & parameters.truncates(each)), found, nothing)
    cut = parameters.where(sampled, cut, Truncation.greedy(choice.token_ids))
    # All of it is computed: where a part alone was used, jaxlib's StableHLO passes crashed.
    return forms.barrier(jax.tree.map(lambda x: x.reshape(shape), cut))  # type: ignore[no-any-return]


def cuts(
    rows: GroupedRows, found: RowRead, sampling: Sampling, sampled: Bool[Array, " N"]
) -> Truncation:
    """The cuts [N] of the sampled rows; those of others keep everything.

    The read's candidates settle most rows. Of what is left, and that alone, 1,024 candidates are
    read, and rows whose cut lies beyond take a search, one after the other. Rows that min-p alone
    cuts go there at once: their search is a look at each logit.

    Args:
      rows: the logits.
      found: their read.
      sampling: of each row [N].
      sampled: the valid rows of requests that are not greedy.
    """
    is_cut = sampled & parameters.truncates(sampling)
    nothing = vary_like(Truncation.nothing(is_cut.shape, rows.vocab_size), is_cut)

    def some() -> Truncation:
        cut, settled = row_cuts.cut_among(
            found.top_ids,
            found.top_logits,
            found.scale,
            sampling,
            rows.vocab_size,
            row_read.num_candidates(sampling, rows.vocab_size),
        )
        cut = parameters.where(is_cut & settled, cut, nothing)
        if rows.vocab_size <= MANY_CANDIDATES:
            return cut  # all tokens are candidates
        left = is_cut & ~settled
        by_more, by_search = (
            functools.partial(call, rows, found.scale, sampling) for call in (_by_more, _by_search)
        )
        if rows.vocab_size <= MOST_CANDIDATES:
            return _where_any(left, cut, by_more)[0]
        known = left & (sampling.top_k <= 0) & (sampling.top_p >= 1)
        cut, left = _where_any(left & ~known, cut, by_more)
        return _where_any(left | known, cut, by_search)[0]

    return lax.cond(jnp.any(is_cut), some, lambda: nothing)  # type: ignore[no-any-return]


def _by_more(
    rows: GroupedRows, scale: RowScale, sampling: Sampling, left: jax.Array, cut: Truncation
) -> tuple[Truncation, Bool[Array, " N"]]:
    """The cuts with those of the rows that are `left` [N] bool, and which are left by more
    candidates."""
    index, number = compacted(left)
    # A symbolic number of rows is one block.
    block = index.shape[0]
    if isinstance(block, int):
        block = min(ROWS_WITH_MORE, block)

    def work(start: jax.Array) -> tuple[Truncation, jax.Array]:
        begin = jnp.minimum(start, index.shape[0] - block)  # of the last block, which begins early
        there = lax.dynamic_slice_in_dim(index, begin, block)
        count = jnp.minimum(number - begin, block)
        own = rows if block == index.shape[0] else rows.pin_to_iteration(start)
        found = own.candidates(MOST_CANDIDATES, there, count)
        return row_cuts.cut_first(
            rows.vocab_size, count, *found, *at_rows(there, (scale, sampling))
        )

    nothing = Truncation.nothing(index.shape, rows.vocab_size), jnp.zeros_like(left)
    more, settled = map_blocks(work, block, number, nothing, (rows.logits, cut, left))
    place = jnp.where(settled, index, left.shape[0])
    return scattered(cut, more, place, number), left.at[place].set(False, mode="drop")


def _by_search(
    rows: GroupedRows, scale: RowScale, sampling: Sampling, left: jax.Array, cut: Truncation
) -> tuple[Truncation, Bool[Array, " N"]]:
    """The cuts with those of the rows that are `left`, searched for one row at a time: all."""
    index, number = compacted(left)

    def one(i: jax.Array, cut: Truncation) -> Truncation:
        row, there = index[i], lax.dynamic_slice_in_dim(index, i, 1)
        x = lax.dynamic_slice_in_dim(forms.pin_to_iteration(rows.logits, row), row, 1)
        x = of_logits.apply(x, of_logits.of_rows(rows.changes, there))
        its_scale, its_sampling = at_rows(there, (scale, sampling))
        shard = VocabShard(rows.shard.axis_name, rows.vocab_size)
        single = cut_search.searched(x, its_sampling, its_scale, shard)
        return jax.tree.map(lambda all, new: all.at[row].set(new[0]), cut, single)  # type: ignore[no-any-return]

    return lax.fori_loop(0, number, one, cut), jnp.zeros_like(left)


def _where_any(
    left: jax.Array,
    cut: Truncation,
    call: Callable[[jax.Array, Truncation], tuple[Truncation, jax.Array]],
) -> tuple[Truncation, jax.Array]:
    """`call(left, cut)` where a row is left."""
    return lax.cond(jnp.any(left), call, lambda left, cut: (cut, left), left, cut)  # type: ignore[no-any-return]
