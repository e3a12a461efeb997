"""The distribution that a request's tokens are drawn from.

`residual.py` draws from it, with random numbers that are functions of (request seed, position of
the token that they decide, purpose) and of nothing else.

Axes: B slots, `*rows` what lies between slot and vocabulary (often S positions), V vocabulary,
N = B * ... all rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.backends.greedy import greedy
from pallas_kernels.backends.groups import MANY as MANY_CANDIDATES
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.types import Greedy
from pallas_kernels.lowering.forms import map_blocks, vary_like
from pallas_kernels.meshes.placement import WHOLE, VocabShard
from pallas_kernels.sampling import cut_search, parameters, row_cuts, row_read
from pallas_kernels.sampling.parameters import Sampling, Truncation, compacted, scattered
from pallas_kernels.sampling.row_read import RowRead
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
    shape, width = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(-1, width)
    if choice is None:
        choice = greedy(flat, axis_name=shard.axis_name, vocab_size=shard.vocab_size)
    each = parameters.of_each_row(sampling, shape)
    sampled = choice.valid & (each.temperature > 0)
    vocab_size = shard.size(width)

    def found() -> Truncation:
        rows = GroupedRows.of(flat, shard)
        return cuts(rows, row_read.read(rows, each), each, sampled)

    def nothing() -> Truncation:
        return vary_like(Truncation.nothing((len(flat),), vocab_size), choice)

    # A batch that cuts nothing pays for nothing.
    cut = lax.cond(jnp.any(sampled & parameters.truncates(each)), found, nothing)
    cut = parameters.where(sampled, cut, Truncation.greedy(choice.token_ids))
    shaped: Truncation = jax.tree.map(lambda x: x.reshape(shape), cut)
    return shaped


def cuts(
    rows: GroupedRows, found: RowRead, sampling: Sampling, sampled: Bool[Array, " N"]
) -> Truncation:
    """The cuts [N] of the sampled rows; those of others keep everything.

    The read's candidates settle most rows. What is left, and that alone, is read again: rows of
    min-p alone once more (`row_cuts.cut_of`); of the others 1,024 candidates are read, and rows
    whose cut lies beyond take a search, one after the other.

    Args:
      rows: the logits.
      found: their read.
      sampling: of each row [N].
      sampled: the valid rows of requests that are not greedy.
    """
    asked = sampled & parameters.truncates(sampling)
    nothing = vary_like(Truncation.nothing(asked.shape, rows.vocab_size), asked)

    def some() -> Truncation:
        row = (found.largest, found.inverse, found.total)
        cut, settled = row_cuts.cut_among(
            found.top_ids,
            found.top_logits,
            row,
            sampling,
            rows.vocab_size,
            row_read.num_candidates(sampling, rows.vocab_size),
        )
        cut = parameters.where(asked & settled, cut, nothing)
        if rows.vocab_size <= MANY_CANDIDATES:
            return cut  # all tokens are candidates
        return _for_the_rest(asked & ~settled, cut, again)

    def again(left: jax.Array, cut: Truncation) -> Truncation:
        by_gap = left & row_cuts.suffices(sampling, rows.vocab_size)
        others = left & ~by_gap

        def by_more(left: jax.Array, cut: Truncation) -> Truncation:
            return _by_more(rows, found, sampling, left, cut, by_gap)

        def once_more(left: jax.Array, cut: Truncation) -> Truncation:
            return row_cuts.cut_of(rows, found, sampling, left, cut)

        if rows.shard.axis_name is None:
            cut = _for_the_rest(by_gap, cut, once_more)
            return _for_the_rest(others, cut, by_more)
        # Shards exchange both kinds of rows at once.
        both: Truncation = lax.cond(jnp.any(others), by_more, once_more, left, cut)
        return both

    cut: Truncation = lax.cond(jnp.any(asked), some, lambda: nothing)
    return cut


def _by_more(
    rows: GroupedRows,
    found: RowRead,
    sampling: Sampling,
    left: jax.Array,
    cut: Truncation,
    by_gap: jax.Array,
) -> Truncation:
    """The cuts with those of the rows that are `left` [N] bool: by more candidates, or a search.

    by_gap: rows that take `row_cuts.cut_of` instead; on shards they are among those that are left.
    """
    index, number = compacted(left)
    block = min(ROWS_WITH_MORE, len(index))
    no_words = jnp.zeros((block, 0), jnp.int32)

    def work(start: jax.Array) -> tuple[Truncation, jax.Array]:
        begin = jnp.minimum(start, len(index) - block)  # of the last block, which begins early
        there = lax.dynamic_slice_in_dim(index, begin, block)
        count = jnp.minimum(number - begin, block)
        own = rows if block == len(index) else rows.pin_to_iteration(start)
        words = no_words
        if rows.shard.axis_name is not None:
            words = _words_of_gaps(own, found, sampling, there, count, by_gap[there])
        ids, logits, every = own.candidates(MOST_CANDIDATES, there, count, words)
        mine: Sampling = jax.tree.map(lambda x: x[there], sampling)
        row = jax.tree.map(lambda x: x[there], (found.largest, found.inverse, found.total))
        more, settled = row_cuts.cut_among(ids, logits, row, mine, rows.vocab_size)
        if rows.shard.axis_name is not None:
            of_gaps = row_cuts.joined(every, found, there, rows.vocab_size)
            more = parameters.where(by_gap[there], of_gaps, more)
            settled |= by_gap[there]
        return more, settled

    nothing = Truncation.nothing(index.shape, rows.vocab_size), jnp.zeros_like(left)
    more, settled = map_blocks(work, block, number, nothing, (rows.logits, cut, left))
    place = jnp.where(settled, index, len(left))
    cut = scattered(cut, more, place, number)
    if rows.vocab_size <= MOST_CANDIDATES:
        return cut
    still = left & ~jnp.zeros_like(left).at[place].set(True, mode="drop")
    return _for_the_rest(still, cut, lambda left, cut: _by_search(rows, sampling, left, cut))


def _words_of_gaps(
    rows: GroupedRows,
    found: RowRead,
    sampling: Sampling,
    index: jax.Array,
    number: jax.Array,
    by_gap: jax.Array,
) -> Int32[Array, "R _"]:
    """`row_cuts.own_words` of the first rows of `index`, if one of them is `by_gap` [R] bool."""
    shape = len(index), row_cuts.num_words(rows.vocab_size)

    def nothing() -> jax.Array:
        return vary_like(jnp.zeros(shape, jnp.int32), (rows.arrays, index))

    words: jax.Array = lax.cond(
        jnp.any(by_gap),
        lambda: row_cuts.own_words(rows, found, sampling, index, number),
        nothing,
    )
    return words


def _by_search(
    rows: GroupedRows, sampling: Sampling, left: jax.Array, cut: Truncation
) -> Truncation:
    """The cuts with those of the rows that are `left`, searched for one row at a time."""
    index, number = compacted(left)

    def one(i: jax.Array, cut: Truncation) -> Truncation:
        row = index[i]
        # As a value of this trip: else XLA would make all logits float32 before the loop.
        logits = lax.optimization_barrier((rows.logits, row))[0]  # type: ignore[no-untyped-call]
        x = lax.dynamic_slice_in_dim(logits, row, 1)
        x = of_logits.apply(x, of_logits.of_rows(rows.changes, row[None]))
        own: Sampling = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), sampling)
        shard = VocabShard(rows.shard.axis_name, rows.vocab_size)
        single = cut_search.searched(x, own, shard)
        put: Truncation = jax.tree.map(lambda all, new: all.at[row].set(new[0]), cut, single)
        return put

    found: Truncation = lax.fori_loop(0, number, one, cut)
    return found


def _for_the_rest(
    left: jax.Array, cut: Truncation, call: Callable[[jax.Array, Truncation], Truncation]
) -> Truncation:
    """`call(left, cut)` where a row is left."""
    found: Truncation = lax.cond(jnp.any(left), call, lambda _, cut: cut, left, cut)
    return found
