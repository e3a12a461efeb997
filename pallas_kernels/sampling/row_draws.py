"""The token after the accepted drafts, drawn from what they left of the row's distribution.

Where few tokens are kept, Gumbel-max draws among the read's candidates. How many a row keeps
depends on the row and its request alone, and so does which way it goes. Elsewhere it draws in two
steps: a group of 256 tokens by the logarithm of its sum, then a token in it. That is exactly the
row's distribution, for V / 256 + 256 random numbers and one more look at one group.

After a rejection the draw is from max(p - q, 0), which differs from p in the few tokens that q has.
These compete with the groups one by one, by their own weights, and the sums of their groups are
made again without them: a difference of sums would be rounding where little is left.

Axes: B slots, one row each; L groups of this device, M tokens that q has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.backends import read
from pallas_kernels.backends.groups import MANY as MANY_CANDIDATES
from pallas_kernels.backends.groups import WIDTH, Drawn, GroupSums, RowsToDraw
from pallas_kernels.backends.xla.group_sums import sums_of_groups
from pallas_kernels.lowering.blocks import map_blocks, vary_like
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.gumbel import log_of
from pallas_kernels.numbers.random_draws import GROUP, RECOVER, Source, best, gumbel
from pallas_kernels.sampling.parameters import Sampling, Truncation, compacted, truncates
from pallas_kernels.sampling.row_read import RowRead, num_candidates, scaled
from pallas_kernels.sampling.rows import GroupedRows

SOME_GROUPS = 64  # that the kept tokens of most rows are in
SLOTS = 64  # to draw for at a time
Outputs = TypeVar("Outputs", bound=Any)  # a tree of arrays [B]


class Drawing(NamedTuple):
    """B rows to draw from, and what is taken out of them."""

    rows: Int32[Array, " B"]  # their places among all rows
    cut: Truncation  # [B]
    sampled: jax.Array  # [B] bool; other rows' draws are not looked at
    few: jax.Array  # [B] bool: `keeps_few`
    excluded_ids: Int32[Array, "B M"]  # the tokens of q; -1 where there is none
    log_p: Float32[Array, "B M"]  # of these tokens; -inf where p has none
    q: Float32[Array, "B M"]
    source: Source  # [B]


def draw(logits: GroupedRows, found: RowRead, drawing: Drawing) -> Int32[Array, " B"]:
    """A token of each row: of p without q, or of p where nothing is left of it."""
    log_mass = found.log_total[drawing.rows] + drawing.cut.log_kept
    few = drawing.sampled & drawing.few
    widely = drawing.sampled & ~drawing.few
    nothing = jnp.full_like(log_mass, -jnp.inf), jnp.full_like(drawing.rows, -1)
    no_token = vary_like(nothing, few)

    def by_tokens() -> tuple[jax.Array, jax.Array]:
        return draw_among(found, drawing.rows, drawing.cut, drawing.excluded_ids, drawing.source)

    score, token = _drawn_widely(logits, found, drawing._replace(sampled=widely))
    score, token = _of_all_shards(logits, score, token)
    own_score, own_token = lax.cond(jnp.any(few), by_tokens, lambda: no_token)
    score, token = jnp.where(few, own_score, score), jnp.where(few, own_token, token)

    # A taken token's noise is its own: the sum of its group does not have it.
    noise = gumbel(drawing.source, RECOVER, drawing.excluded_ids)
    left = jnp.maximum(exponential(drawing.log_p) - drawing.q, 0.0)
    apart, apart_id = best(log_of(left) + log_mass[:, None] + noise, drawing.excluded_ids)
    chosen = jnp.where(apart > score, apart_id, token)
    # Rounding can leave nothing of a residual whose p and q are equal: then p is the answer, and
    # all of it is in the taken tokens.
    _, of_p = best(drawing.log_p + log_mass[:, None] + noise, drawing.excluded_ids)
    return jnp.where(jnp.maximum(score, apart) > -jnp.inf, chosen, of_p)


def _drawn_widely(logits: GroupedRows, found: RowRead, drawing: Drawing) -> Drawn:
    """`_by_groups` of the sampled rows: by a kernel on a GPU, else by XLA, if there are any."""
    given = RowsToDraw(
        rows=jnp.where(drawing.sampled, drawing.rows, -1),
        cut_logit=drawing.cut.cut_logit,
        cut_id=drawing.cut.cut_id,
        excluded_ids=drawing.excluded_ids,
        seed=drawing.source.seed,
        position=drawing.source.position,
        maxima=found.groups.maxima,
        sums=found.groups.sums,
        largest=found.largest,
        inverse=found.inverse,
    )

    def by_xla(arrays: Any) -> Drawn:
        own, found, drawing = arrays
        rows = logits.with_arrays(*own)
        nothing = Drawn(
            jnp.full(drawing.rows.shape, -jnp.inf, jnp.float32), jnp.full_like(drawing.rows, -1)
        )

        def by_groups() -> Drawn:
            own = found.largest[drawing.rows], found.inverse[drawing.rows]
            slots = drawing, *own
            return _in_blocks(lambda rows, *some: _by_groups(rows, found, *some), rows, slots)

        # Each shard finds its own.
        no_group = vary_like(nothing, (drawing, rows.logits))
        drawn: Drawn = lax.cond(jnp.any(drawing.sampled), by_groups, lambda: no_group)
        return drawn

    arrays = logits.arrays, found, drawing
    if logits.shard.axis_name is not None or logits.changes is not None:
        return by_xla(arrays)
    return read.draw(given, arrays, (GROUP, RECOVER), by_xla, logits.logits)


def _by_groups(
    logits: GroupedRows,
    found: RowRead,
    drawing: Drawing,
    largest: Float32[Array, " B"],
    inverse: Float32[Array, " B"],
) -> Drawn:
    """The score of this device's best group of each row, and a token in it that is not taken."""
    sums = _kept_groups(logits, found, drawing)
    sums = _without_taken(logits, sums, drawing, inverse)
    numbers = jnp.broadcast_to(logits.numbers()[None], sums.sums.shape)
    place = jnp.broadcast_to(jnp.arange(sums.sums.shape[1], dtype=jnp.int32), sums.sums.shape)
    scores = log_of(sums.sums) + scaled(sums.maxima, largest[:, None], inverse[:, None])
    scores = jnp.where(sums.sums > 0, scores + gumbel(drawing.source, GROUP, numbers), -jnp.inf)
    score, first = best(scores, place)
    maximum = jnp.take_along_axis(sums.maxima, first[:, None], axis=1)
    return Drawn(score, _in_group(logits, logits.first + first, maximum, drawing, inverse))


def _in_blocks(work: Callable[..., Outputs], logits: GroupedRows, slots: Any) -> Outputs:
    """work(logits, *slots), of at most `SLOTS` slots at a time: 64 groups of a slot are 64 KB."""
    number = len(jax.tree.leaves(slots)[0])
    if number <= SLOTS:
        return work(logits, *slots)

    def block(start: jax.Array) -> Outputs:
        some = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, SLOTS), slots)
        return work(logits.pin_to_iteration(start), *some)

    like = jax.eval_shape(lambda *some: work(logits, *some), *slots)
    zeros: Outputs = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), like)
    return map_blocks(block, SLOTS, None, zeros, (logits.logits, slots))


def _kept_groups(logits: GroupedRows, found: RowRead, drawing: Drawing) -> GroupSums:
    """This device's groups of the rows' kept tokens.

    Of a row that is cut, groups are summed again: of most such rows only a few, whose maxima reach
    the cut; of the others all.
    """
    maxima, sums = (x[drawing.rows] for x in found.groups)
    own = GroupSums(logits.own(maxima, -jnp.inf), logits.own(sums, 0.0))
    is_cut = drawing.sampled & (drawing.cut.cut_logit > -jnp.inf)
    reached = own.maxima >= drawing.cut.cut_logit[:, None]
    inverse = found.inverse[drawing.rows]

    def again() -> GroupSums:
        some = _some_groups(logits, own, reached, drawing, inverse)
        some = _where(is_cut, some, own)
        widely = is_cut & (reached.sum(axis=1) > SOME_GROUPS)
        all_kept: GroupSums = lax.cond(
            jnp.any(widely),
            lambda: _all_groups(logits, some, widely, drawing, inverse),
            lambda: some,
        )
        return all_kept

    kept: GroupSums = lax.cond(jnp.any(is_cut), again, lambda: own)
    return kept


def _some_groups(
    logits: GroupedRows,
    own: GroupSums,
    reached: Bool[Array, "B L"],
    drawing: Drawing,
    inverse: Float32[Array, " B"],
) -> GroupSums:
    """The kept tokens' sums of the `SOME_GROUPS` groups of each row with the largest maxima.

    Of no others: those of a row that has more are not all.
    """
    batch, local = reached.shape
    most = min(SOME_GROUPS, local)
    slot = jnp.arange(batch, dtype=jnp.int32)[:, None]
    best_maxima, place = lax.top_k(jnp.where(reached, own.maxima, -jnp.inf), most)
    rows = jnp.broadcast_to(drawing.rows[:, None], place.shape).reshape(-1)
    x, ids = logits.tokens(rows, (place + logits.first).reshape(-1))
    x, ids = (part.reshape(batch, most, -1) for part in (x, ids))
    cut: Truncation = jax.tree.map(lambda part: part[:, None], drawing.cut)
    again = sums_of_groups(jnp.where(cut.keeps(x, ids), x, -jnp.inf), inverse[:, None])
    place = jnp.where(best_maxima > -jnp.inf, place, local)
    return GroupSums(
        jnp.full_like(own.maxima, -jnp.inf).at[slot, place].set(again.maxima, mode="drop"),
        jnp.zeros_like(own.sums).at[slot, place].set(again.sums, mode="drop"),
    )


def _all_groups(
    logits: GroupedRows,
    sums: GroupSums,
    widely: Bool[Array, " B"],
    drawing: Drawing,
    inverse: Float32[Array, " B"],
) -> GroupSums:
    """The sums with those of all groups of the kept tokens of these rows."""
    index, number = compacted(widely)
    cut = drawing.cut.cut_logit[index], drawing.cut.cut_id[index]
    kept = logits.kept_sums(cut, inverse[index], drawing.rows[index], number)
    place = jnp.where(jnp.arange(len(index)) < number, index, len(index))
    put: GroupSums = jax.tree.map(lambda x, new: x.at[place].set(new, mode="drop"), sums, kept)
    return put


def _where(rows: Bool[Array, " B"], a: GroupSums, b: GroupSums) -> GroupSums:
    """The groups [B, L] of `a` in these rows, those of `b` in the others."""
    chosen: GroupSums = jax.tree.map(lambda x, y: jnp.where(rows[:, None], x, y), a, b)
    return chosen


def _without_taken(
    logits: GroupedRows, sums: GroupSums, drawing: Drawing, inverse: jax.Array
) -> GroupSums:
    """The groups without the taken tokens: those that had one are summed again."""
    taken = drawing.excluded_ids
    there = taken >= 0
    if taken.shape[1] == 1:
        return _without_one(logits, sums, drawing, inverse)

    def again() -> GroupSums:
        batch, count = taken.shape
        most = min(count, logits.num_groups)
        slot = jnp.arange(batch, dtype=jnp.int32)[:, None]
        group = jnp.where(there, taken // WIDTH, -1)
        # Each group once: the places of taken tokens that have the first of theirs, in order.
        first = jnp.argmax(group[:, :, None] == group[:, None, :], axis=2)
        leads = there & (first == jnp.arange(count)[None])
        number = jnp.where(leads, jnp.cumsum(leads, axis=1) - 1, most)
        groups = jnp.full((batch, most), -1, jnp.int32).at[slot, number].set(group, mode="drop")
        place = jnp.where(there, jnp.take_along_axis(number, first, axis=1), most)

        rows = jnp.broadcast_to(drawing.rows[:, None], groups.shape).reshape(-1)
        x, ids = logits.tokens(rows, jnp.maximum(groups, 0).reshape(-1))
        x, ids = (part.reshape(batch, most, -1) for part in (x, ids))
        cut: Truncation = jax.tree.map(lambda part: part[:, None], drawing.cut)
        x = jnp.where(cut.keeps(x, ids), x, -jnp.inf)
        x = x.at[slot, place, taken % WIDTH].set(-jnp.inf, mode="drop")
        found = sums_of_groups(x, inverse[:, None])
        mine = jnp.where(logits.has(groups), groups - logits.first, sums.sums.shape[1])
        put: GroupSums = jax.tree.map(
            lambda all, new: all.at[slot, mine].set(new, mode="drop"), sums, found
        )
        return put

    found: GroupSums = lax.cond(jnp.any(there), again, lambda: sums)
    return found


def _without_one(
    logits: GroupedRows, sums: GroupSums, drawing: Drawing, inverse: jax.Array
) -> GroupSums:
    """`_without_taken` where one token at most is: its group needs no search, and no branch."""
    taken = drawing.excluded_ids
    group = jnp.where(taken >= 0, taken // WIDTH, -1)
    x, ids = logits.tokens(drawing.rows, jnp.maximum(group[:, 0], 0))
    kept = drawing.cut.keeps(x, ids) & (ids != taken)
    found = sums_of_groups(jnp.where(kept, x, -jnp.inf), inverse)
    own = (logits.numbers()[None] == group) & logits.has(group)
    return GroupSums(*(jnp.where(own, new[:, None], x) for x, new in zip(sums, found, strict=True)))


def _in_group(
    logits: GroupedRows,
    group: Int32[Array, " B"],
    largest: Float32[Array, "B 1"],
    drawing: Drawing,
    inverse: Float32[Array, " B"],
) -> Int32[Array, " B"]:
    """A token of one group of each row, not one that is taken.

    largest: of the logits that it is drawn among.
    """
    x, ids = logits.tokens(drawing.rows, group)
    taken = (ids[:, :, None] == drawing.excluded_ids[:, None, :]).any(axis=2)
    x = jnp.where(drawing.cut.keeps(x, ids) & ~taken, x, -jnp.inf)
    largest = jnp.where(largest > -jnp.inf, largest, jnp.float32(0))
    _, token = best(
        scaled(x, largest, inverse[:, None]) + gumbel(drawing.source, RECOVER, ids), ids
    )
    return token


def _of_all_shards(
    logits: GroupedRows, score: Float32[Array, " B"], token: Int32[Array, " B"]
) -> tuple[jax.Array, jax.Array]:
    """The token of the shard with the largest score; of equal ones the first."""
    words = jnp.stack([lax.bitcast_convert_type(score, jnp.int32), token])
    every = logits.shard.gathered(words)
    scores = lax.bitcast_convert_type(every[:, 0], jnp.float32)
    shard = jnp.argmax(scores, axis=0)[None]
    found = (jnp.take_along_axis(x, shard, axis=0)[0] for x in (scores, every[:, 1]))
    score, token = found
    return score, token


def keeps_few(
    read: RowRead, cut: Truncation, sampling: Sampling, vocab_size: int
) -> Bool[Array, " N"]:
    """Which rows keep no token but candidates.

    Args:
      read: of the rows.
      cut: of each.
      sampling: of each.
      vocab_size: V.
    """
    asked = truncates(sampling)
    if vocab_size <= MANY_CANDIDATES:
        return asked
    last = num_candidates(sampling, vocab_size)[:, None] - 1
    ids, logits = (jnp.take_along_axis(x, last, axis=1) for x in (read.top_ids, read.top_logits))
    more = (cut.keeps(logits, ids) & (ids >= 0))[:, 0]  # perhaps
    by_k = (sampling.top_k > 0) & (sampling.top_k <= MANY_CANDIDATES)
    return asked & (by_k | ~more)


def draw_among(
    read: RowRead,
    rows: Int32[Array, " B"],
    cut: Truncation,
    excluded_ids: Int32[Array, "B M"],
    source: Source,
) -> tuple[Float32[Array, " B"], Int32[Array, " B"]]:
    """The score and the id of a kept candidate of each row, not one that is taken.

    Scores are logarithms of weights exp((x - m) / T), plus noise of (source, token id).

    Args:
      read: of all rows.
      rows: those to draw from.
      cut: [B].
      excluded_ids: -1 where there is none.
      source: [B], of the noise.
    """
    ids, x = (part[rows, :MANY_CANDIDATES] for part in (read.top_ids, read.top_logits))
    taken = (ids[:, :, None] == excluded_ids[:, None, :]).any(axis=2)
    kept = cut.keeps(x, ids) & (ids >= 0) & ~taken
    gap = scaled(x, read.largest[rows][:, None], read.inverse[rows][:, None])
    return best(jnp.where(kept, gap + gumbel(source, RECOVER, ids), -jnp.inf), ids)
