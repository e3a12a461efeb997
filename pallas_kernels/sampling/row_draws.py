"""Tokens of rows, drawn from a row's distribution or from what a rejected draft leaves of it.

Where few tokens are kept, Gumbel-max draws among the read's candidates. How many a row keeps
depends on the row and its request alone, and so does which way it goes. Elsewhere it draws in two
steps: a group of 256 tokens by the logarithm of its sum, then a token in it. That is exactly the
row's distribution, for V / 256 + 256 random numbers and one more look at one group.

After a rejection the draw is from max(p - q, 0), which differs from p in the few tokens that q has.
These compete with the groups one by one, by their own weights, and the sums of their groups are
made again without them: a difference of sums would be rounding where little is left.

Axes: B slots, one row each, or all rows; L groups of this device, M tokens that q has, none in a
plain draw.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.backends import read
from pallas_kernels.backends.groups import MANY as MANY_CANDIDATES
from pallas_kernels.backends.groups import WIDTH, Drawn, GroupSums, RowsToDraw, keeps
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.backends.xla.group_sums import sums_of_groups
from pallas_kernels.lowering.forms import vary_like
from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.lowering.row_pieces import at_place, filled, summed
from pallas_kernels.numbers.random_draws import GROUP, RECOVER, Source, best, gumbel, log_of
from pallas_kernels.sampling.parameters import Sampling, Truncation, truncates
from pallas_kernels.sampling.row_read import RowSummary
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.sampling.types import Batch

DRAWN_GROUPS = 8  # of a slot, to sum again at a time
ROUNDING = 1e-3  # of scores: more than that of float32


class Drawing(NamedTuple):
    """B rows to draw from, and what is taken out of them."""

    rows: Int32[Array, " B"]  # their places among all rows
    cut: Truncation  # [B]
    largest: Float32[Array, " B"]  # m
    inverse: Float32[Array, " B"]  # 1 / T
    log_total: Float32[Array, " B"]
    sampled: jax.Array  # [B] bool; other rows' draws are not looked at
    few: jax.Array  # [B] bool: `keeps_few`
    excluded_ids: Int32[Array, "B M"]  # the tokens of q; -1 where there is none
    log_p: Float32[Array, "B M"]  # of these tokens; -inf where p has none
    p: Float32[Array, "B M"]
    q: Float32[Array, "B M"]
    source: Source  # [B]

    @classmethod
    def plain(
        cls,
        batch: Batch,
        read: RowSummary,
        cut: Truncation,
        sampled: Bool[Array, " N"],
        few: Bool[Array, " N"],
    ) -> "Drawing":
        """The B * S rows of the slots, of which nothing is taken out; the rest is of N rows."""

        def flat(x: jax.Array) -> jax.Array:
            return x.reshape(-1)

        scales = read.largest, read.inverse, read.log_total
        values = jax.tree.map(flat, batch.by_slot((cut, scales, sampled, few)))
        cut, (largest, inverse, log_total), sampled, few = values
        if batch.row_ids is not None:  # no kernel draws for a row that is none
            sampled &= flat(batch.row_ids >= 0)
        rows, seed = flat(batch.rows), batch.sampling.seed[:, None]
        source = Source(*map(flat, (jnp.broadcast_to(seed, batch.rows.shape), batch.positions)))
        no_columns = jnp.zeros((rows.shape[0], 0), jnp.float32)
        return cls(
            rows, cut, largest, inverse, log_total, sampled, few,
            no_columns.astype(jnp.int32), no_columns, no_columns, no_columns, source,
        )  # fmt: skip


def draw_rows(logits: GroupedRows, row_read: RowSummary, drawing: Drawing) -> Int32[Array, " B"]:
    """A token of each row: of p without q, or of p where nothing is left of it."""
    log_mass = drawing.log_total + drawing.cut.log_kept
    drawn, noise = _drawn_apart(logits, row_read, drawing)
    drawn = draws_of_all_shards(logits, drawn)
    if not drawing.excluded_ids.shape[1]:
        return drawn.token_ids
    if logits.shard.axis_name is not None:
        # As it is of a type that does not vary over the shards.
        noise = gumbel(drawing.source, RECOVER, drawing.excluded_ids)

    # A taken token's noise is its own: the sum of its group does not have it.
    residual = jnp.maximum(drawing.p - drawing.q, 0.0)
    apart, apart_id = best(log_of(residual) + log_mass[:, None] + noise, drawing.excluded_ids)
    chosen = jnp.where(apart > drawn.score, apart_id, drawn.token_ids)
    # Rounding can leave nothing of a residual whose p and q are equal: then p is the answer, and
    # all of it is in the taken tokens.
    _, of_p = best(drawing.log_p + log_mass[:, None] + noise, drawing.excluded_ids)
    return jnp.where(jnp.maximum(drawn.score, apart) > -jnp.inf, chosen, of_p)


def _drawn_apart(
    logits: GroupedRows, row_read: RowSummary, drawing: Drawing
) -> tuple[Drawn, Float32[Array, "B M"]]:
    """The best token that is not taken of each sampled row, and the noise of those that are.

    A GPU's kernel draws for rows that keep many tokens.
    """
    widely = drawing.sampled & ~drawing.few
    nobody = jnp.full_like(drawing.rows, -1)
    rows_to_draw = RowsToDraw(
        rows=jnp.where(widely, drawing.rows, nobody),
        cut_logit=drawing.cut.cut_logit,
        cut_id=drawing.cut.cut_id,
        excluded_ids=drawing.excluded_ids if drawing.excluded_ids.shape[1] else nobody[:, None],
        seed=drawing.source.seed,
        position=drawing.source.position,
        maxima=row_read.groups.maxima,
        sums=row_read.groups.sums,
        largest=row_read.largest,
        inverse=row_read.inverse,
    )

    def by_xla(arrays: Any) -> tuple[Drawn, jax.Array]:
        rows, row_read, drawing = arrays
        widely = drawing.sampled & ~drawing.few
        zeros = jnp.zeros(widely.shape, jnp.float32)
        none = zeros - jnp.inf, drawing.rows, zeros
        # Each shard finds its own.
        no_group = vary_like(_Group(*none), (drawing, rows.logits))
        group: _Group = lax.cond(
            jnp.any(widely),
            lambda: best_group(rows, row_read, drawing._replace(sampled=widely)),
            lambda: no_group,
        )
        lists = _candidates(row_read, drawing), rows.tokens(drawing.rows, group.number)
        x, ids = _either(drawing.few, *lists)
        largest = jnp.where(drawing.few, drawing.largest, group.largest)
        drawn, noise = best_token(drawing, x, ids, largest)
        return drawn._replace(score=jnp.where(drawing.few, drawn.score, group.score)), noise

    def with_few(drawn: Drawn, arrays: Any) -> tuple[Drawn, jax.Array]:
        _, row_read, drawing = arrays
        few, noise = best_token(drawing, *_candidates(row_read, drawing), drawing.largest)
        chosen: Drawn = jax.tree.map(lambda x, y: jnp.where(drawing.few, x, y), few, drawn)
        return chosen, noise

    arrays: Any = logits, row_read, drawing._replace(few=drawing.sampled & drawing.few)
    if logits.shard.axis_name is not None:
        return by_xla(arrays)
    purposes = GROUP, RECOVER
    return read.draw(
        rows_to_draw, arrays, purposes, by_xla, logits.logits, with_few, logits.changes
    )


class _Group(NamedTuple):
    """A group of each row."""

    score: Float32[Array, " B"]
    number: Int32[Array, " B"]
    largest: Float32[Array, " B"]  # of the logits that a token is drawn among; else 0


def best_group(logits: GroupedRows, row_read: RowSummary, drawing: Drawing) -> _Group:
    """The group of this device with the best score, of each row.

    The read's sums are those of whole rows. Groups that a cut reaches, or that have a taken token,
    are summed again, `DRAWN_GROUPS` of each slot at a time. With all of its tokens a group has a
    better score: those that are best then come first, until no other can win. Of most rows that is
    soon.
    """
    largest, inverse = drawing.largest[:, None], drawing.inverse[:, None]
    sums: GroupSums = jax.tree.map(lambda x: x[drawing.rows], row_read.groups)
    sums = GroupSums(
        logits.local_columns(sums.maxima, -jnp.inf), logits.local_columns(sums.sums, 0.0)
    )
    cut_logit, taken = drawing.cut.cut_logit[:, None], drawing.excluded_ids
    taken_groups = jnp.where(taken >= 0, taken // WIDTH, -1)
    numbers = jnp.broadcast_to(logits.numbers()[None], sums.sums.shape)
    reached = sums.maxima >= cut_logit
    changed = (taken_groups[:, :, None] == numbers[:, None]).any(axis=1)
    changed |= (cut_logit > -jnp.inf) & reached
    changed &= drawing.sampled[:, None] & logits.has(logits.numbers())[None]
    # Of whole vectors of numbers: with a pad in it, XLA's CPU loop of the noise is no vector code.
    padded_numbers = logits.first + jnp.arange(-(-numbers.shape[1] // 32) * 32, dtype=jnp.int32)
    padded_numbers = jnp.broadcast_to(padded_numbers, (numbers.shape[0], padded_numbers.size))
    noise = prevent_recompute(gumbel(drawing.source, GROUP, padded_numbers)[:, : numbers.shape[1]])

    def scores(sums: GroupSums, noise: jax.Array) -> jax.Array:
        scores = log_of(sums.sums) + scaled(sums.maxima, largest, inverse) + noise
        return jnp.where(sums.sums > 0, scores, -jnp.inf)

    def best_of(scores: jax.Array, numbers: jax.Array, sums: GroupSums) -> _Group:
        score, number = best(scores, numbers)
        is_number = numbers == number[:, None]
        largest = summed(jnp.where(is_number, lax.bitcast_convert_type(sums.maxima, jnp.int32), 0))
        return _Group(score, number, lax.bitcast_convert_type(largest[0], jnp.float32))

    group_scores = prevent_recompute(scores(sums, noise))
    batch, local = group_scores.shape
    slot, count = jnp.arange(batch, dtype=jnp.int32)[:, None], min(DRAWN_GROUPS, local)

    def may_win(state: tuple[jax.Array, _Group]) -> jax.Array:
        remaining, chosen = state
        return jnp.any(remaining > chosen.score[:, None] - ROUNDING)

    def again(state: tuple[jax.Array, _Group]) -> tuple[jax.Array, _Group]:
        remaining, chosen = state
        some, place = lax.top_k(remaining, count)
        rows = jnp.broadcast_to(drawing.rows[:, None], place.shape).reshape(-1)
        x, ids = logits.pin_to_iteration(remaining).tokens(rows, (place + logits.first).reshape(-1))
        x, ids = (part.reshape(batch, count, -1) for part in (x, ids))
        cut: Truncation = jax.tree.map(lambda part: part[:, None], drawing.cut)
        x = jnp.where(cut.keeps(x, ids), x, -jnp.inf)
        number = place + logits.first
        in_group = number[:, :, None] == taken_groups[:, None]
        column = jnp.where(in_group, taken[:, None] % WIDTH, WIDTH)
        x = x.at[slot[..., None], jnp.arange(count, dtype=jnp.int32)[None, :, None], column].set(
            -jnp.inf, mode="drop"
        )
        new = sums_of_groups(x, inverse)
        more = scores(new, jnp.take_along_axis(noise, place, axis=1))
        more = jnp.where(some > -jnp.inf, more, -jnp.inf)
        other = best_of(more, number, new)
        wins = (other.score > chosen.score) | (
            (other.score == chosen.score) & (other.number < chosen.number)
        )
        remaining = remaining.at[slot, place].set(-jnp.inf)
        return remaining, jax.tree.map(lambda x, y: jnp.where(wins, x, y), other, chosen)

    first = best_of(jnp.where(changed | ~reached, -jnp.inf, group_scores), numbers, sums)
    start = vary_like((jnp.where(changed, group_scores, -jnp.inf), first), (changed, logits.logits))
    _, chosen = lax.while_loop(may_win, again, start)
    return chosen._replace(largest=jnp.where(chosen.largest > -jnp.inf, chosen.largest, 0.0))


def _candidates(row_read: RowSummary, drawing: Drawing) -> tuple[jax.Array, jax.Array]:
    """The logits and ids of the candidates of each row; of many, the first."""
    top = row_read.top_logits, row_read.top_ids
    logits, ids = (part[drawing.rows, :MANY_CANDIDATES] for part in top)
    return logits, ids


def _either(
    rows: Bool[Array, " B"], a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """The logits and ids of `a` in these rows, those of `b` in the others; no tokens behind."""
    width = max(a[0].shape[1], b[0].shape[1])

    def chosen(x: jax.Array, y: jax.Array, missing: float) -> jax.Array:
        x, y = (filled(values, width, missing) for values in (x, y))
        return jnp.where(rows[:, None], x, y)

    return chosen(a[0], b[0], -jnp.inf), chosen(a[1], b[1], -1)


def best_token(
    drawing: Drawing,
    x: Float32[Array, "B C"],
    ids: Int32[Array, "B C"],
    largest: Float32[Array, " B"],
) -> tuple[Drawn, Float32[Array, "B M"]]:
    """The best of the tokens `ids` [-1: none] that are kept and not taken; and those's noise.

    Scores are logarithms of weights exp((x - largest) / T), plus noise of (source, token id).
    """
    taken = (ids[:, :, None] == drawing.excluded_ids[:, None, :]).any(axis=2)
    is_kept = drawing.cut.keeps(x, ids) & (ids >= 0) & ~taken
    gap = scaled(x, largest[:, None], drawing.inverse[:, None])
    token_ids = jnp.concatenate([ids, drawing.excluded_ids], axis=1)
    noise, apart = jnp.split(gumbel(drawing.source, RECOVER, token_ids), [ids.shape[1]], axis=1)
    scores = prevent_recompute(jnp.where(is_kept, gap + noise, -jnp.inf))
    return Drawn(*best(scores, ids)), apart


def draws_of_all_shards(logits: GroupedRows, drawn: Drawn) -> Drawn:
    """The token of the shard with the largest score; of equal ones the first."""
    if logits.shard.axis_name is None:
        return drawn
    draws = logits.shard.gathered_together(drawn)
    shard = jnp.argmax(draws.score, axis=0)[None]
    return Drawn(*(jnp.take_along_axis(x, shard, axis=0)[0] for x in draws))


def keeps_few(
    read: RowSummary, cut: Truncation, sampling: Sampling, vocab_size: int
) -> Bool[Array, " N"]:
    """Which rows keep no token but candidates.

    Args:
      read: of the rows.
      cut: of each.
      sampling: of each.
      vocab_size: V.
    """
    is_cut = truncates(sampling)
    if vocab_size <= MANY_CANDIDATES:
        return is_cut
    last = jnp.maximum(read.num_candidates, 1) - 1
    ids, logits = at_place(last, (read.top_ids, read.top_logits))
    more = keeps(logits, ids, cut.cut_logit, cut.cut_id) & (ids >= 0)  # perhaps
    by_k = (sampling.top_k > 0) & (sampling.top_k <= MANY_CANDIDATES)
    return is_cut & (by_k | ~more)
