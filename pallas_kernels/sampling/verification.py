"""Verification: which drafts the target model accepts, and the token that follows them.

Greedy requests accept a draft that equals the target's own choice, and sampled ones a certain
draft that equals what is drawn there without it. Where drafts were drawn, it is rejection sampling
(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318), of each draft or of all of a
slot's together (`block_rule.py`). In all cases the emitted tokens
follow the target's processed distribution exactly, whatever the drafter proposed.

Axes: B slots, D drafts, S = D + 1 positions, V vocabulary.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.backends.greedy import greedy_of_part
from pallas_kernels.backends.groups import keeps
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.contract.arguments import check_bool
from pallas_kernels.contract.changes import Changes, apply, apply_at, of_rows
from pallas_kernels.contract.rows import MAX_VOCABULARY, Rows, check_k
from pallas_kernels.contract.types import Greedy
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.lowering.programs import compiled, compiled_with_rule, is_traced
from pallas_kernels.lowering.row_pieces import at_place
from pallas_kernels.meshes.placement import AxisName, Split, VocabShard
from pallas_kernels.meshes.split import on_own_part
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.random_draws import ACCEPT, Source, uniform
from pallas_kernels.sampling import block_rule, door, row_read
from pallas_kernels.sampling.dense_q import (
    DraftQ,
    QScale,
    Target,
    draw_residual,
    residual_masses,
)
from pallas_kernels.sampling.distribution import cuts
from pallas_kernels.sampling.parameters import Sampling, Truncation, has_meaning, where
from pallas_kernels.sampling.row_draws import Drawing, draw_rows, keeps_few
from pallas_kernels.sampling.row_read import RowSummary
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.sampling.types import (
    AcceptRule,
    Batch,
    CompactQ,
    DenseQ,
    Drafts,
    Rule,
    Verified,
    slots_of_rows,
)


class Rules(NamedTuple):
    """How drafts with a q are accepted; static."""

    rule: Rule
    accept: AcceptRule | None  # the caller's own, of each draft


def accepted_by_ratio(
    u: Float32[Array, "*drafts"], p: Float32[Array, "*drafts"], q: Float32[Array, "*drafts"]
) -> Bool[Array, "*drafts"]:
    """Accept with probability min(1, p / q): `u` is uniform in [0, 1).

    The rule is a product and a strict comparison: p = 0 is never accepted, not even at u = 0, and
    p >= q always is.
    """
    return u * q < p


def verify(
    logits: Float[Array, "B S V"] | Float[Array, "N V"],
    drafts: Drafts,
    sampling: Sampling,
    positions: Int32[Array, " B"],
    *,
    row_ids: Int32[Array, "B S"] | None = None,
    accept: AcceptRule | None = None,
    rule: Rule = "token",
    k: int | None = None,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    vocab_size: int | None = None,
    allowed: Int32[Array, "*rows _"] | UInt32[Array, "*rows _"] | None = None,
    bias_token_ids: Int32[Array, "*rows I"] | None = None,
    bias: Float32[Array, "*rows I"] | None = None,
    all_greedy: bool = False,
) -> Verified:
    """Verify `drafts` against the target's logits.

    Drafts without a q are certain. Each position's token is then what plain decoding draws at
    (seed, position), and a draft is accepted exactly where it equals that: the same logits give the
    same tokens, whatever was drafted and however many.

    Drafts with a q were drawn from it by the caller, with any independent random numbers. Each is
    accepted with probability min(1, p / q), and a refused one is followed by a token of
    max(p - q, 0): the tokens have the target's distribution. q must be what they were really drawn
    from: logprobs that were rounded after the draw are another q, and the law is off by as much.

    Where arguments are concrete, what has no meaning is refused: a NaN, a top_p of 95, a q that
    does not sum to one. Under `jax.jit` nobody sees the values, and such a slot follows another
    law.

    Args:
      logits: S = D + 1; row j predicts the token after drafts 0..j-1.
      drafts: the proposals, with a q [B, D, M] or over the whole vocabulary, or none.
      sampling: each slot's parameters; seeds of any integer type are taken modulo 2**32, and a
        temperature of 0 or less is greedy.
      positions: the sequence position of the token that row 0 predicts.
      row_ids: the logits are flat, [N, V], and these are the rows of each slot among them; no row
        is copied. Outside [0, N): the slot has no such row, its draft is not accepted, and
        nothing is emitted there. A row belongs to one slot and position at most; others are
        padding, and hold anything. `row_ids_of` makes them from the slots' numbers of rows.
        Flat rows that are split over devices travel, since a slot's may be on any of them: where
        each device has those of its slots, call this inside `jax.shard_map`.
      accept: your own rule, `(u, p, q) -> bool` of u uniform in [0, 1), with q = 1 of certain
        drafts; None: u * q < p where there is a q, so that tokens have the target's distribution.
      rule: static; "block" decides about a slot's drafts together (Sun et al., arXiv 2403.10444):
        the same distribution, never fewer tokens in expectation. For drafts with a q; greedy slots
        are verified as ever.
      k: static; with it, the read that verifies leaves what the logprobs of any token need, with so
        many top columns: `emitted_logprobs` makes them of the result. It then reads for every row
        what only the accepted ones may need. Without, `topk_logprobs` of the emitted tokens reads
        their rows.
      mesh, axis_name: the mesh axis that splits the vocabulary of the logits; inside
        `jax.shard_map` without the mesh. Neither: logits may be split by slots and vocabulary over
        any mesh with explicit or automatic axes: their type or the compiler tells, and no row of
        [B, S, V] travels, but with automatic axes where `accept` is your own. `axis_name=()` says
        that they are whole here. On the same logits, the emitted tokens are those of one device.
      vocab_size: V, where columns of padding follow.
      allowed, bias_token_ids, bias: changes of each row's logits, [B, S, ...] or [N, ...] as the
        logits, as `topk_logprobs` has them. All is decided by the changed logits. With `k`,
        `Verified.read` is of the logits themselves, and `changed_read` of the changed ones.
      all_greedy: static; every slot is greedy, whatever its temperature, and the program has
        nothing of sampling: it is a fraction of the size. The tokens are those of temperature 0.

    Returns:
      The emitted tokens. At an invalid row (see `greedy`) verification stops: that row emits its
      greedy token. A NaN in a slot's temperature, top_p or min_p makes its rows invalid; outside of
      jit it is refused.

    Raises:
      TypeError: an argument is no array or not of its kind, such as a JAX key for a seed.
      ValueError: the drafts are not one fewer than the rows, another shape does not go with the
        logits, there are no logits, or k is not from 0 to the vocabulary's size and 512.
    """
    logits, sampling, positions, row_ids = door.checked_rows(
        logits, sampling, positions, row_ids=row_ids
    )
    drafts = door.drafts_of(drafts)
    door.check_rule(rule, drafts, accept)
    door.check_accept(accept)
    how, all_greedy = (
        door.split_of(mesh, axis_name, vocab_size),
        check_bool("all_greedy", all_greedy),
    )
    # A vocabulary shard does not know how many tokens all have.
    is_shard = axis_name and mesh is None
    k = door.k_of(k, vocab_size or (MAX_VOCABULARY if is_shard else logits.shape[-1]))
    batch, num_positions = logits.shape[:2] if row_ids is None else row_ids.shape
    if drafts.token_ids.shape != (batch, num_positions - 1):
        rows = f"logits {logits.shape}" if row_ids is None else f"row_ids {row_ids.shape}"
        raise ValueError(
            f"drafts {drafts.token_ids.shape} do not go with {rows}: B slots of S "
            f"rows verify [B, S - 1] = {(batch, num_positions - 1)} drafts"
        )
    values = None
    if isinstance(drafts.q, DenseQ):
        door.check_columns(drafts.q, logits)
    door.check_q(drafts, sampling, row_ids, logits.shape, vocab_size)
    if isinstance(drafts.q, DenseQ):
        # The values are split as the logits, and all else of q as what a slot has.
        values, drafts = drafts.q.values, drafts._replace(q=_without_values(drafts.q))
    changes = door.checked_changes(allowed, bias_token_ids, bias, logits.shape[:-1])
    of_slots = drafts._replace(report=None), sampling, positions, row_ids, changes
    arrays = (logits, values), of_slots
    if accept is None:
        verified = compiled(_verified, how, k, all_greedy, rule, None)(*arrays)
    else:
        # What the compiler asks for later can't refuse, nor close over a rule's traced values.
        static = how._replace(axis_name=axis_name or ()), k, all_greedy, rule, accept
        if is_traced(arrays) or not isinstance(accept, Hashable):
            verified = _verified(*static, *arrays)
        else:
            verified = compiled_with_rule(_verified, *static)(*arrays)
    # What logprobs of these rows need travels with the result.
    return verified._replace(row_ids=row_ids, changes=None if changes == Changes() else changes)


def _verified(
    how: Split,
    k: int | None,
    all_greedy: bool,
    rule: Rule,
    accept: AcceptRule | None,
    split: Any,
    by_slot: Any,
) -> Verified:
    """`verify` of checked arguments; split: the logits, and a dense q's values or None."""

    def on_shard(shard: VocabShard, split: Any, by_slot: Any) -> Verified:
        logits, values = split
        drafts, sampling, positions, row_ids, changes = by_slot
        vocab_size = shard.size(logits.shape[-1])
        if k is not None:
            check_k(k, vocab_size)
        if values is not None:
            drafts = drafts._replace(q=replace(drafts.q, values=values))
        if row_ids is None:
            logits, changes = _flat(logits), jax.tree.map(_flat, changes)
        batch = _batch_of(drafts, sampling, positions, vocab_size)
        if row_ids is not None:
            batch = batch.with_rows(row_ids, logits.shape[0])
        row_changes = row_read.prepared_changes(changes, shard, logits)
        return _verify(
            shard, logits, row_changes, batch, Rules(rule, accept), k, every_greedy=all_greedy
        )

    row_ids, values = by_slot[3], split[1]
    flat = frozenset({1}) if values is not None and values.ndim == 2 else frozenset[int]()
    return on_own_part(on_shard, split, by_slot, how, by_row=row_ids is None, flat=flat)


def _without_values(q: DenseQ) -> Any:
    """What a slot has of its q; inside of a call its values are kept with the logits."""
    return replace(q, values=None)  # type: ignore[arg-type]


def _flat(x: Any) -> Any:
    """x [B, S, ...] as [B * S, ...]."""
    return x.reshape(-1, *x.shape[2:]) if hasattr(x, "reshape") else x


def _batch_of(
    drafts: Drafts, sampling: Sampling, positions: Int32[Array, " B"], vocab_size: int
) -> Batch:
    index = jnp.arange(drafts.token_ids.shape[1] + 1, dtype=jnp.int32)[None, :]
    # An id outside the vocabulary has probability 0 under p and q, as if it were not proposed.
    proposed = (index[:, :-1] < drafts.num[:, None]) & (drafts.token_ids >= 0)
    proposed &= drafts.token_ids < vocab_size
    return Batch(positions[:, None] + index, proposed, drafts, sampling)


def _verify(
    shard: VocabShard,
    logits: Float[Array, "N C"],
    changes: Changes | None,
    batch: Batch,
    rules: Rules,
    k: int | None,
    *,
    every_greedy: bool,
) -> Verified:
    """`verify` where this device holds the columns of `shard` of all logits.

    XLA on a CPU and the kernels for GPUs change logits as they read them, block by block. The
    kernels for TPUs take no changes in the read of groups: there, and on vocabulary shards, whose
    groups have neighbors, a copy of the logits is changed first.
    """
    is_sampled = False if every_greedy else None
    verified = functools.partial(_verify_rows, shard, rules, k)

    def in_place(logits: jax.Array, changes: Changes | None, batch: Batch) -> Verified:
        return verified(is_sampled, logits, changes, None, batch)

    def in_a_copy(logits: jax.Array, changes: Changes, batch: Batch) -> Verified:
        unchanged = None if k is None else logits
        return verified(is_sampled, apply(logits, changes), None, unchanged, batch)

    def greedily(logits: jax.Array, changes: Changes, batch: Batch) -> Verified:
        return verified(False, logits, changes, None, batch)

    if changes is None:
        return in_place(logits, changes, batch)
    # A rule of the user's own may close over traced values.
    if shard.axis_name is not None or rules.accept is not None:
        return in_a_copy(logits, changes, batch)
    arguments: Any = logits, changes, batch
    return lowered_for(*arguments, like=greedily, default=in_a_copy, cpu=in_place, cuda=in_place)


def _verify_rows(
    shard: VocabShard,
    rules: Rules,
    k: int | None,
    is_sampled: bool | None,
    logits: Float[Array, "N C"],
    changes: Changes | None,
    unchanged: Float[Array, "N C"] | None,
    batch: Batch,
) -> Verified:
    """`verify` of rows whose changes, if they have any, are applied as they are read.

    With `k`, the read is the same for sampled and greedy rows, and leaves what logprobs need.

    unchanged: the logits before they were changed, where these are a copy and `k` asks for both.
    is_sampled: static; whether some slot is; None: it is not known.
    """
    rows = functools.partial(GroupedRows.of, logits, shard, changes)
    sampling_of_rows = functools.partial(batch.of_each_row, logits.shape[0])
    if k is None:

        def sampled() -> Verified:
            grouped = rows()
            read = _of_named_rows(
                batch.row_ids, row_read.read_sampled_rows(grouped, sampling_of_rows())
            )
            return sampled_slots(shard, grouped, read, None, batch, rules)

        def all_greedy() -> Verified:
            return _greedily(batch, _greedy_choice(shard, logits, changes, batch))

        return _either(is_sampled, batch, sampled, all_greedy)
    grouped, before = rows(), None if unchanged is None else GroupedRows.of(unchanged, shard)
    sampling = sampling_of_rows()
    if is_sampled is False:  # nothing is cut, and the program has no read for candidates
        nothing_cut = Sampling.greedy(logits.shape[0])
        sampling = nothing_cut._replace(temperature=sampling.temperature)
    reads = row_read.read_changed(grouped, sampling, k, before)
    read = _of_named_rows(batch.row_ids, reads[0])
    choice = Greedy(row_read.with_invalid(grouped, read, read.top_ids[:, 0]), read.valid)
    verified = _either(
        is_sampled,
        batch,
        lambda: sampled_slots(shard, grouped, read, choice, batch, rules),
        lambda: _greedily(batch, choice),
    )
    return _with_reads(verified, reads, batch, k)


def _greedy_choice(
    shard: VocabShard, logits: Float[Array, "N C"], changes: Changes | None, batch: Batch
) -> Greedy:
    """The greedy choice of each row, as it is changed.

    XLA copies changed rows, on a GPU a few at a time, with launches for each of them. The kernels'
    read of groups changes logits as it goes, and its largest group has the choice.
    """

    def by_xla(logits: jax.Array, changes: Changes | None, _: jax.Array | None) -> Greedy:
        return greedy_of_part(shard, Rows(logits, changes=changes))

    def by_groups(logits: jax.Array, changes: Changes | None, row_ids: jax.Array | None) -> Greedy:
        rows = GroupedRows.of(logits, shard, changes)
        read = row_read.read_sampled_rows(rows, Sampling.greedy(logits.shape[0]))
        read = _of_named_rows(row_ids, read)
        token_ids = row_read.with_invalid(rows, read, row_read.greedy_ids(rows, read))
        return Greedy(token_ids, read.valid)

    if changes is None:
        return by_xla(logits, None, None)
    row_ids = batch.row_ids  # handed in: of what a function closes over, jax says that it leaks
    return lowered_for(logits, changes, row_ids, like=by_xla, default=by_xla, cuda=by_groups)


def _with_reads(
    verified: Verified, reads: tuple[RowSummary, ...], batch: Batch, k: int
) -> Verified:
    """With what logprobs need of the rows: as they were read and, if there are two, unchanged."""
    row_sampling = batch.of_each_row(reads[0].valid.shape[0])
    shape = batch.shape_of(reads[0].valid)
    rows_read = [row_read.for_logprobs(read, row_sampling, k, shape) for read in reads]
    return verified._replace(
        read=rows_read[-1], changed_read=rows_read[0] if len(rows_read) > 1 else None
    )


def _of_named_rows(row_ids: Int32[Array, "B S"] | None, read: RowSummary) -> RowSummary:
    """A read in which no row that no slot has is invalid."""
    if row_ids is None:
        return read
    slots = slots_of_rows(row_ids, read.valid.shape[0])
    return read._replace(valid=read.valid | (slots == row_ids.shape[0]))


def _either(
    is_sampled: bool | None,
    batch: Batch,
    sampled: Callable[[], Verified],
    greedily: Callable[[], Verified],
) -> Verified:
    """What serves the slots; a branch decides where it is not known whether some are sampled."""
    if is_sampled is None:
        slots = (batch.sampling.temperature > 0) | ~has_meaning(batch.sampling)
        return typed.cond(jnp.any(slots), sampled, greedily)
    return sampled() if is_sampled else greedily()


def _greedily(batch: Batch, choice: Greedy) -> Verified:
    """Accept the drafts that equal the greedy choices; then comes the greedy choice."""
    token_ids = batch.by_slot(choice.token_ids)
    return _that_agree(batch, token_ids, choice.valid)._replace(cut=Truncation.greedy(token_ids))


def _that_agree(batch: Batch, token_ids: Int32[Array, "B S"], valid: Bool[Array, " N"]) -> Verified:
    """Accept the drafts that equal the tokens of their rows; then comes that of the next row."""
    agrees = batch.proposed & batch.by_slot(valid)[:, :-1]
    return _emit(batch, agrees & (batch.drafts.token_ids == token_ids[:, :-1]), token_ids)


def sampled_slots(
    shard: VocabShard,
    rows: GroupedRows,
    read: RowSummary,
    choice: Greedy | None,
    batch: Batch,
    rules: Rules,
) -> Verified:
    """Accept drafts by p and q; then comes a token from what they left of p.

    Greedy slots are verified as ever, from the same read. So are those whose drafts are certain, by
    the tokens that are drawn of each row.

    shard: the columns of the logits, and of a dense q.
    choice: of the N rows, where the read has told it.
    """
    positions, proposed, drafts, sampling = batch[:4]
    row_sampling, q = batch.of_each_row(read.valid.shape[0]), _compact_q(drafts)
    is_plain = drafts.q is None and rules.accept is None
    valid = read.valid & has_meaning(row_sampling)
    ids = q.ids[..., :0] if is_plain else q.ids
    if choice is None:
        own_ids, x = _looked_up(rows, row_read.greedy_ids(rows, read), batch, ids)
        choice = Greedy(row_read.with_invalid(rows, read, own_ids), valid)
    else:
        _, x = _looked_up(rows, jnp.zeros(0, jnp.int32), batch, ids)
        choice = choice._replace(valid=valid)
    is_sampled = valid & (row_sampling.temperature > 0)
    cut = where(
        is_sampled, cuts(rows, read, row_sampling, is_sampled), Truncation.greedy(choice.token_ids)
    )
    few = keeps_few(read, cut, row_sampling, rows.vocab_size)
    if is_plain:
        drawing = Drawing.plain(batch, read, cut, is_sampled, few)
        drawn = draw_rows(rows, read, drawing).reshape(positions.shape)
        token_ids = jnp.where(batch.by_slot(is_sampled), drawn, batch.by_slot(choice.token_ids))
        return _that_agree(batch, token_ids, valid)._replace(cut=batch.by_slot(cut))
    log_p = _log_p(batch, read, cut, is_sampled, q.ids, x)

    p, q_probs = prevent_recompute(exponential(jnp.stack([log_p, q.logprobs])))
    is_draft = q.ids == drafts.token_ids[..., None]
    p_draft, q_draft = (jnp.where(is_draft, x, 0.0).sum(axis=2) for x in (p, q_probs))
    considered = proposed & batch.by_slot(valid)[:, :-1]
    dense = target = None
    if isinstance(drafts.q, DenseQ):
        dense = DraftQ.of(shard, drafts.q, drafts.token_ids)
        q_draft = dense.drafted()
        scale = QScale(read.largest, read.inverse, read.log_total)
        target = Target(batch.rows, *batch.by_slot((cut, scale)))
    before = positions[:, :-1]
    seeds = jnp.broadcast_to(sampling.seed[:, None], before.shape)
    u = uniform(Source(seeds, before), ACCEPT)
    best_ids = batch.by_slot(choice.token_ids)
    agrees = considered & (drafts.token_ids == best_ids[:, :-1])
    samples = sampling.temperature > 0
    if rules.rule == "block":
        leading = considered & (jnp.cumsum(~considered, axis=1, dtype=jnp.int32) == 0)
        weights = block_rule.prefix_weights(p_draft, q_draft, leading)
        if dense is None:
            masses = block_rule.residual_mass(p, q_probs, weights[:, :-1])
        else:
            needed = leading & samples[:, None] & (weights[:, :-1] > 0)
            needed &= jnp.arange(needed.shape[1], dtype=jnp.int32)[None] > 0
            first = jax.tree.map(lambda x: x[:, :-1], target)
            masses = residual_masses(rows, dense, first, weights[:, :-1], needed)
        together = block_rule.num_accepted(u, weights, masses, leading)
        a = jnp.where(samples, together, _leading(agrees))
        # Of the accepted drafts; it is above 0 wherever a sampled slot ends.
        weight = at_place(a, jnp.where(weights > 0, weights, jnp.float32(1)))
        accepted = jnp.arange(considered.shape[1], dtype=jnp.int32)[None] < a[:, None]
    else:
        by_chance = (rules.accept or accepted_by_ratio)(u, p_draft, q_draft)
        returned = jnp.result_type(by_chance)
        if not jnp.issubdtype(returned, jnp.bool_):
            raise TypeError(f"accept returned {returned}: give a function that returns bools")
        accepted = considered & jnp.where(samples[:, None], by_chance, agrees)
        a, weight = _leading(accepted), None

    # What a dense q leaves of p is drawn apart: it may differ in every token.
    taken = q.ids, (log_p, p, q_probs)
    if dense is not None:
        taken = jax.tree.map(lambda x: x[..., :0], taken)
    drawing = _drawing(batch, read, cut, (is_sampled, few), considered, *taken, a)
    if weight is not None:  # max(w p - q, 0), of which a multiple is drawn from
        drawing = drawing._replace(q=drawing.q / weight[:, None])
    drawn = draw_rows(rows, read, drawing)
    if dense is not None and target is not None:
        rejected = at_place(a, considered) & drawing.sampled
        drawn = draw_residual(
            rows,
            dense,
            at_place(a, target),
            jnp.minimum(a, considered.shape[1] - 1),
            jnp.ones_like(drawing.largest) if weight is None else weight,
            rejected,
            drawing.source,
            otherwise=drawn,
        )
    next_ids = jnp.where(drawing.sampled[:, None], drawn[:, None], best_ids)
    return _emit(batch, accepted, next_ids)._replace(cut=batch.by_slot(cut))


def _compact_q(drafts: Drafts) -> CompactQ:
    """The drafts' q; of certain drafts, and of those with a dense q, the drafts' own tokens."""
    if isinstance(drafts.q, CompactQ):
        return drafts.q
    ids = drafts.token_ids[..., None]
    return CompactQ(ids, jnp.zeros(ids.shape, jnp.float32))


def _looked_up(
    rows: GroupedRows, local_ids: Int32[Array, " n"], batch: Batch, ids: Int32[Array, "B D M"]
) -> tuple[Int32[Array, " n"], Float32[Array, "B D M"]]:
    """The greedy tokens of valid rows, and the logits of the tokens of q; one exchange.

    local_ids: this device's part of the greedy tokens [N], or nothing where they are known.
    """
    row = batch.rows[:, :-1, None]
    width = rows.logits.shape[1]
    column = ids - rows.shard.ids(width)[0]
    is_on_shard = (column >= 0) & (column < width)
    place = jnp.clip(column, 0, width - 1)
    x = rows.logits.at[row, place].get().astype(jnp.float32)
    if rows.changes is not None and ids.size:
        row_index = jnp.broadcast_to(row[..., 0], column.shape[:2]).reshape(-1)
        changes = of_rows(rows.changes, row_index)
        x = apply_at(
            x.reshape(row_index.shape[0], -1), place.reshape(row_index.shape[0], -1), changes
        )
        x = x.reshape(column.shape)
    bits = jnp.where(is_on_shard, lax.bitcast_convert_type(x, jnp.int32), 0)
    # As integers, of which one device has each and the others add 0.
    words = rows.shard.across_sum(jnp.concatenate([local_ids, bits.reshape(-1)]))
    logits = lax.bitcast_convert_type(words[local_ids.shape[0] :].reshape(ids.shape), jnp.float32)
    return words[: local_ids.shape[0]], jnp.where(ids >= 0, logits, -jnp.inf)


def _log_p(
    batch: Batch,
    read: RowSummary,
    cut: Truncation,
    is_sampled: Bool[Array, " N"],
    ids: Int32[Array, "B D M"],
    x: Float32[Array, "B D M"],
) -> Float32[Array, "B D M"]:
    """log p of the tokens of q; -inf of tokens that are not kept, and in rows without p."""

    def before_drafts(values: jax.Array) -> jax.Array:
        return batch.by_slot(values)[:, :-1, None]

    last_id, last = before_drafts(cut.cut_id), before_drafts(cut.cut_logit)
    is_kept = keeps(x, ids, last, last_id) & (ids >= 0) & before_drafts(is_sampled)
    gap = scaled(x, before_drafts(read.largest), before_drafts(read.inverse))
    mass = before_drafts(read.log_total + cut.log_kept)
    return jnp.where(is_kept, jnp.minimum(gap - mass, 0.0), -jnp.inf)


def _drawing(
    batch: Batch,
    read: RowSummary,
    cut: Truncation,
    which: tuple[Bool[Array, " N"], Bool[Array, " N"]],
    considered: Bool[Array, "B D"],
    ids: Int32[Array, "B D M"],
    of_drafts: tuple[Float32[Array, "B D M"], ...],
    a: Int32[Array, " B"],
) -> Drawing:
    """The rows after `a` accepted drafts: less q after a rejection.

    Past the proposals and at an invalid row there is no q to take out. which: the rows that are
    sampled, and those that keep few tokens. of_drafts: log p, p and q of the tokens `ids`.
    """
    values = cut, read.largest, read.inverse, read.log_total, *which
    rows, of_rows = at_place(a, (batch.rows, batch.by_slot(values)))
    marks = jnp.broadcast_to(considered[..., None], ids.shape)
    rejected, ids, log_p, p, q = at_place(a, (marks, ids, *of_drafts))
    return Drawing(
        rows,
        *of_rows,
        excluded_ids=jnp.where(rejected, ids, -1),
        log_p=jnp.where(rejected, log_p, -jnp.inf),
        p=jnp.where(rejected, p, 0.0),
        q=jnp.where(rejected, q, 0.0),
        source=Source(batch.sampling.seed, batch.positions[:, 0] + a),
    )


def _leading(accepted: Bool[Array, "B D"]) -> Int32[Array, " B"]:
    """How many leading entries of each slot are true."""
    drafts = accepted.shape[1]
    index = jnp.arange(drafts, dtype=jnp.int32)[None]
    return jnp.min(jnp.where(accepted, drafts, index), axis=1, initial=drafts)


def _emit(batch: Batch, accepted: Bool[Array, "B D"], next_ids: Int32[Array, "B S"]) -> Verified:
    """The leading accepted drafts, then the one of `next_ids` of the row where they end."""
    a, num = _leading(accepted), jnp.ones((), jnp.int32)
    if batch.row_ids is not None:
        next_ids = jnp.where(batch.row_ids >= 0, next_ids, -1)
        last = at_place(a, next_ids)
        num = (last >= 0).astype(jnp.int32)
    index = jnp.arange(next_ids.shape[1], dtype=jnp.int32)[None, :]
    padded = jnp.pad(batch.drafts.token_ids, ((0, 0), (0, 1)))
    token_ids = jnp.where(index < a[:, None], padded, jnp.where(index == a[:, None], next_ids, -1))
    return Verified(token_ids, a + num)
