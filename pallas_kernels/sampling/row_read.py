"""What one read of the rows leaves for verification, and the logprobs that it gives as well."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.backends import answers, exact_sums
from pallas_kernels.backends import read as reads
from pallas_kernels.backends.greedy import greedy_of_part
from pallas_kernels.backends.groups import FEW as FEW_CANDIDATES
from pallas_kernels.backends.groups import MANY as MANY_CANDIDATES
from pallas_kernels.backends.groups import (
    GroupSums,
    Needed,
    Read,
    inverse_temperature,
)
from pallas_kernels.backends.row_totals import row_mass
from pallas_kernels.backends.xla.groups import larger_than
from pallas_kernels.contract.arguments import check_bool
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs, Rows, RowSums, check_changes, skipped_rows
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.meshes.placement import WHOLE, AxisName, Split, VocabShard
from pallas_kernels.meshes.split import on_own_part
from pallas_kernels.numbers.logarithm import log_of_total
from pallas_kernels.numbers.ordered_keys import largest_and_first, strictly_larger
from pallas_kernels.sampling import door
from pallas_kernels.sampling.parameters import Sampling, truncates
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.sampling.types import RowsRead, Verified, slots_of_rows
from pallas_kernels.topk.digests import digests_of_part


class RowSummary(NamedTuple):
    """The rows' sums and candidates; the same on every vocabulary shard."""

    groups: GroupSums  # [N, G], at each row's temperature
    top_ids: Int32[Array, "N _"]  # of the rows that are cut; -1 where there are no more
    top_logits: Float32[Array, "N _"]
    num_candidates: Int32[Array, " N"]  # how many of them decide, of the rows that are cut
    largest: Float32[Array, " N"]  # m
    inverse: Float32[Array, " N"]  # 1 / T
    total: exact_sums.Mass  # of exp((x - m) / T) over the row
    log_total: Float32[Array, " N"]
    valid: Bool[Array, " N"]
    first_group: Int32[Array, " N"]  # of a valid row, the first with its largest logit
    log_sum: Float32[Array, " N"] | None = None  # of exp(x - m), where logprobs need it

    @property
    def scale(self) -> "RowScale":
        """What the weights of the rows' tokens are relative to."""
        return RowScale(self.largest, self.inverse, self.total)


class RowScale(NamedTuple):
    """The weight of a row's token with logit x is exp((x - m) / T), and its share that over all."""

    largest: Float32[Array, " N"]  # m
    inverse: Float32[Array, " N"]  # 1 / T
    total: exact_sums.Mass  # of the whole row


def read_sampled_rows(rows: GroupedRows, sampling: Sampling, k: int | None = None) -> RowSummary:
    """Read all rows once, as they are changed; arguments as for `read_changed`."""
    return read_changed(rows, sampling, k)[0]


def read_changed(
    rows: GroupedRows, sampling: Sampling, k: int | None, unchanged: GroupedRows | None = None
) -> tuple[RowSummary, ...]:
    """Read all rows once: as they are changed and, with k, then as they are without changes.

    What is changed has no sum at temperature 1 but where that is the row's own.

    Args:
      rows: of any requests.
      sampling: of each row [N].
      k: static; the sums at temperature 1 and so many top columns of every row are read too, and at
        least the first. None: neither.
      unchanged: the rows before they were changed, where `rows` are a copy.
    """
    inverse = inverse_temperature(sampling.temperature)
    count = num_candidates(sampling, rows.vocab_size)
    number = jnp.where((sampling.temperature > 0) & truncates(sampling), count, 0)
    # Of a large top-k it is not known what top-p takes its share of, nor that it is all of the row.
    by_k = (sampling.top_k > 0) & (sampling.top_k < rows.vocab_size)
    by_p = (sampling.top_p < 1) & ~by_k
    share = jnp.where(by_p, sampling.top_p, jnp.float32(2))
    needed = Needed(number, share, by_p & (sampling.min_p <= 0))
    targets = inverse, needed, -1 if k is None else max(k, 1)
    first, *others = rows.read(*targets) + (() if unchanged is None else unchanged.read(*targets))
    if others:
        first = first._replace(raw_sums=first.raw_sums[:, :0])
    return tuple(_of_read(part, inverse, k, rows.vocab_size) for part in (first, *others))


def _of_read(part: Read, inverse: jax.Array, k: int | None, vocab_size: int) -> RowSummary:
    """What a read has found, with what is the same of all its groups."""
    groups, raw_sums, top_ids, top_logits, number = part
    # A group with a NaN is as one with +inf: its row is not valid.
    spoiled = jnp.isnan(groups.maxima) | jnp.isnan(groups.sums)
    numbers = lax.broadcasted_iota(jnp.int32, spoiled.shape, 1)
    largest, group = largest_and_first(jnp.where(spoiled, jnp.inf, groups.maxima), numbers)
    valid = jnp.isfinite(largest)
    if k is not None:
        largest = top_logits[:, 0]
    total = row_mass(groups, largest, inverse, vocab_size)
    read = RowSummary(
        groups=groups,
        top_ids=top_ids,
        top_logits=top_logits,
        num_candidates=number,
        largest=largest,
        inverse=inverse,
        total=total,
        log_total=prevent_recompute(log_of_total(exact_sums.to_float(total, vocab_size))),
        valid=valid,
        first_group=group,
    )
    if k is None:
        return read
    if not raw_sums.shape[1]:
        return read._replace(log_sum=jnp.where(valid & (inverse == 1), read.log_total, jnp.nan))
    once, sums = jnp.ones_like(inverse), GroupSums(groups.maxima, raw_sums)
    of_one = lax.cond(
        jnp.all(inverse == 1), lambda: total, lambda: row_mass(sums, largest, once, vocab_size)
    )
    log_sum = log_of_total(exact_sums.to_float(of_one, vocab_size))
    return read._replace(log_sum=jnp.where(valid, log_sum, jnp.float32(jnp.nan)))


def num_candidates(sampling: Sampling, vocab_size: int) -> Int32[Array, " N"]:
    """How many candidates the read of a row that is cut gives.

    As many as top-k. Of top-p most rows keep no more than many tokens, and of min-p few;
    `distribution.cuts` reads more of the others.
    """
    by_k = (sampling.top_k > 0) & (sampling.top_k <= MANY_CANDIDATES)
    others = jnp.where(sampling.top_p < 1, MANY_CANDIDATES, FEW_CANDIDATES)
    if vocab_size <= MANY_CANDIDATES:
        others = jnp.full_like(sampling.top_k, vocab_size)
    return jnp.minimum(jnp.where(by_k, sampling.top_k, others), vocab_size)


def greedy_ids(rows: GroupedRows, read: RowSummary) -> Int32[Array, " N"]:
    """This device's part of each valid row's greedy token: 0 where another device has it."""
    group = read.first_group
    x, ids = rows.tokens(jnp.arange(group.shape[0], dtype=jnp.int32), group)
    return jnp.where(rows.has(group), largest_and_first(x, ids)[1], 0)


def with_invalid(
    rows: GroupedRows, read: RowSummary, token_ids: Int32[Array, " N"]
) -> Int32[Array, " N"]:
    """Greedy tokens [N], those of invalid rows put right: they are seldom, and take a read."""

    def again() -> jax.Array:
        with jax.named_scope("invalid_rows"):
            choice = greedy_of_part(rows.shard, Rows(rows.logits, changes=rows.changes))
        return choice.token_ids

    return typed.cond(jnp.all(read.valid), lambda: token_ids, again)


def for_logprobs(
    read: RowSummary, sampling: Annotated[Sampling, "B = N"], k: int, shape: tuple[int, ...]
) -> RowsRead:
    """What the logprobs of the N = B * S rows, [B, S] = `shape`, need of a read with `k`."""
    assert read.log_sum is not None
    rows_read = RowsRead(
        largest=read.largest,
        log_sum=read.log_sum,
        log_scaled=jnp.where(read.valid, read.log_total, jnp.float32(jnp.nan)),
        temperature=jnp.where(sampling.temperature > 0, sampling.temperature, jnp.float32(1)),
        top_ids=read.top_ids[:, :k],
        top_logits=read.top_logits[:, :k],
        maxima=read.groups.maxima,
    )
    return typed.tree_map(lambda x: x.reshape(*shape, *x.shape[1:]), rows_read)


def emitted_logprobs(
    logits: Float[Array, "B S V"] | Float[Array, "N V"],
    verified: Verified,
    *,
    token_ids: Int32[Array, "B S"] | None = None,
    changed: bool = False,
    scaled: Bool[Array, " B"] | None = None,
    extra_token_ids: Int32[Array, "B C"] | None = None,
    digests: bool = False,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    vocab_size: int | None = None,
) -> Annotated[TopkLogprobs, "B S = R"]:
    """The logprobs of the emitted tokens, from the read that verified the rows.

    They have the bits of `topk_logprobs` by the same implementation. Only the tokens that are
    named are read again. A token that is among the row's top K has its rank from them; for
    the others, and for those alone, the row's larger logits are counted.

    Args:
      logits: as `verify` had them.
      verified: what it returned with `k`, which decides K. It holds the row ids of flat logits, the
        reads and the changes.
      token_ids: other tokens than the emitted ones; -1 where none is wanted, and such a row's
        column 0 has no logprob.
      changed: static; logprobs and ranks are of the changed logits, where `verify` had changes.
      scaled: the slots whose logprobs are those of softmax((x - m) / T); the others', and of all
        slots without it, are raw. Of changed logits, raw ones are NaN where T is not 1.
      extra_token_ids: of each slot, more tokens whose logprobs are wanted of all its rows.
      digests: static; whether `row_digests` of the rows are wanted too, in a read of their own.
      mesh, axis_name, vocab_size: as `verify` had them.

    Returns:
      The results by slot and position, [B, S, ...], also of flat rows. A position without a row is
      as a skipped row of `topk_logprobs`: ids -1, logprobs NaN, token rank 0.

    Raises:
      TypeError: an argument is not of its kind.
      ValueError: `verify` had no `k`, or nothing was changed; a shape does not go with the logits.
    """
    door.check_verified(verified)
    check_bool("changed", changed)
    check_bool("digests", digests)
    read, changes = verified.read, Changes()
    if changed:
        if verified.changed_read is None or verified.changes is None:
            raise ValueError(
                "changed = True, and `verify` had no changes: leave it out, or give `verify` "
                "allowed or bias"
            )
        read, changes = verified.changed_read, verified.changes
    assert read is not None
    shape = verified.token_ids.shape
    flat = logprobs_of_read(
        logits,
        verified.token_ids if token_ids is None else token_ids,
        read,
        row_ids=verified.row_ids,
        scaled=scaled,
        extra_token_ids=extra_token_ids,
        mesh=mesh,
        axis_name=axis_name,
        vocab_size=vocab_size,
        **changes._asdict(),
    )
    # Compiled, since explicit axes lose the place of an empty array in a reshape outside of `jit`.
    results = compiled(_by_position, shape)(flat)
    if not digests:
        return results
    how = door.split_of(mesh, axis_name, vocab_size)
    logits = door.logits_of("logits", logits, is_flat=verified.row_ids is not None)
    words = compiled(_digests, how)(lax.stop_gradient(logits), verified.row_ids)
    return results._replace(digests=words.reshape(*shape, 2))


def _by_position(
    shape: tuple[int, int], results: TopkLogprobs
) -> Annotated[TopkLogprobs, "B S = R"]:
    """The results [B, S, ...] of R = B * S rows."""
    return typed.tree_map(lambda x: x.reshape(*shape, *x.shape[1:]), results)


def _digests(how: Split, logits: jax.Array, row_ids: jax.Array | None) -> jax.Array:
    """`row_digests` of the rows of slots, wherever the logits are."""

    def of_part(shard: VocabShard, x: jax.Array, row_ids: jax.Array | None) -> jax.Array:
        rows = Rows(x.reshape(-1, x.shape[-1]))
        if row_ids is not None:
            rows = rows._replace(row_ids=row_ids.reshape(-1))
        shape = x.shape[:-1] if row_ids is None else row_ids.shape
        return digests_of_part(shard, rows).reshape(*shape, 2)

    return on_own_part(of_part, logits, row_ids, how, by_row=row_ids is None)


def logprobs_of_read(
    logits: Float[Array, "B S V"] | Float[Array, "N V"],
    token_ids: Int32[Array, "B S"],
    read: RowsRead,
    *,
    row_ids: Int32[Array, "B S"] | None = None,
    scaled: Bool[Array, " B"] | None = None,
    extra_token_ids: Int32[Array, "B C"] | None = None,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    vocab_size: int | None = None,
    allowed: Int32[Array, "*rows _"] | UInt32[Array, "*rows _"] | None = None,
    bias_token_ids: Int32[Array, "*rows I"] | None = None,
    bias: Float32[Array, "*rows I"] | None = None,
) -> TopkLogprobs:
    """`emitted_logprobs` of any tokens and of a read alone, where slots differ in which it is.

    Args:
      logits: as `verify` had them.
      token_ids: -1 where none is wanted; such a row's column 0 has no logprob.
      read: `Verified.read`, or `changed_read`, or one of them by slot; it decides K.
      row_ids: as `verify` had them.
      scaled, extra_token_ids: as `emitted_logprobs` has them.
      mesh, axis_name, vocab_size: as `verify` had them.
      allowed, bias_token_ids, bias: as `verify` had them, of the rows whose read is
        `Verified.changed_read`; of others, nothing may be changed.

    Returns:
      The results of R = B * S rows, those of a slot one after another.
    """
    read = door.read_of(read)
    logits = door.logits_of("logits", logits, is_flat=row_ids is not None)
    if logits.shape[:-1] != read.largest.shape:
        raise ValueError(
            f"logits {logits.shape} are not those that were read: rows {read.largest.shape}"
        )
    row_ids = None if row_ids is None else door.row_ids_of_slots(row_ids)
    shape = logits.shape[:2] if row_ids is None else row_ids.shape
    token_ids = door.ids_of("token_ids", token_ids, shape)
    if scaled is not None:
        scaled = door.flags_of("scaled", scaled, shape[0])
    if extra_token_ids is not None:
        extra_token_ids = door.extra_ids_of(extra_token_ids, shape[0])
    how = door.split_of(mesh, axis_name, vocab_size)
    changes = door.checked_changes(allowed, bias_token_ids, bias, logits.shape[:-1])
    arrays = row_ids, token_ids, read, scaled, extra_token_ids, changes
    return compiled(_emitted, how)(logits, *arrays)


def _emitted(
    how: Split, logits: jax.Array, row_ids: jax.Array | None, *by_slot: Any
) -> TopkLogprobs:
    """`emitted_logprobs`, wherever the logits are."""
    if row_ids is not None:
        flat = on_own_part(_of_flat_rows, logits, (row_ids, *by_slot), how, by_row=False)
        return TopkLogprobs(*flat)
    token_ids = by_slot[0]
    results = on_own_part(_of_rows, logits, by_slot, how)
    return TopkLogprobs(*(x.reshape(token_ids.size, *x.shape[2:]) for x in results))


def prepared_changes(changes: Changes, shard: VocabShard, logits: jax.Array) -> Changes | None:
    """A caller's changes of logits [N, C], checked and prepared; of this device's columns."""
    width = logits.shape[1]
    checked = check_changes(*changes, logits.shape[0], shard.size(width))
    return answers.changes_of_shard(checked, shard, width)


def _of_flat_rows(shard: VocabShard, logits: jax.Array, by_slot: Any) -> tuple[jax.Array, ...]:
    """`emitted_logprobs` [B * S, ...] of flat rows [N, V], of each of which it makes a slot."""
    row_ids, token_ids, read, is_scaled, extra, changes = by_slot
    number = logits.shape[0]
    named = (row_ids >= 0) & (row_ids < number)
    place = jnp.where(named, row_ids, number).reshape(-1)
    slots = jnp.minimum(slots_of_rows(jnp.where(named, row_ids, -1), number), row_ids.shape[0] - 1)
    tokens = jnp.full(number, -1, jnp.int32).at[place].set(token_ids.reshape(-1), mode="drop")
    results = _of_rows(
        shard,
        logits[:, None],
        (
            tokens[:, None],
            jax.tree.map(lambda x: x[:, None], read),
            None if is_scaled is None else is_scaled[slots],
            None if extra is None else extra[slots],
            jax.tree.map(lambda x: x[:, None], changes),
        ),
    )
    missing = skipped_rows(place.size, Outputs(read.top_ids.shape[1]), results[3].shape[2])

    def placed(none: jax.Array, x: jax.Array) -> jax.Array:
        is_row = named.reshape(-1, *[1] * (none.ndim - 1))
        return jnp.where(is_row, x[:, 0][jnp.minimum(place, number - 1)], none)

    return tuple(map(placed, missing[:4], results))


def _of_rows(shard: VocabShard, logits: jax.Array, by_slot: Any) -> tuple[jax.Array, ...]:
    """`emitted_logprobs` [B, S, ...] where this device holds the columns of `shard`."""
    token_ids, read, is_scaled, extra, changes = by_slot
    batch, positions, width = logits.shape

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(batch * positions, *x.shape[2:])

    def of_each_row(x: jax.Array) -> jax.Array:
        return flat(jnp.broadcast_to(x[:, None], (batch, positions, *x.shape[1:])))

    ids, flat_read, changes = jax.tree.map(flat, (token_ids, read, changes))
    rows = Rows(flat(logits), ids)
    rows = rows._replace(changes=prepared_changes(changes, shard, rows.logits))
    named = ids[:, None]
    if extra is not None:
        named = jnp.concatenate([named, of_each_row(extra)], axis=1)
    x = answers.named_changed(rows, named, shard)
    k = flat_read.top_ids.shape[1]
    is_number = ~(jnp.isnan(flat_read.top_logits) | jnp.isnan(x[:, :1]))
    larger = (strictly_larger(flat_read.top_logits, x[:, :1]) & is_number).sum(1, dtype=jnp.int32)
    uncounted = ~jnp.isnan(x[:, 0]) & ~jnp.isnan(flat_read.log_scaled) & (larger == k)
    if shard == WHOLE:
        which = jnp.where(uncounted, ids, -1)
        counted = reads.num_larger(rows.logits, flat_read.maxima, which, rows.changes)
    else:
        row_logits = shard.masked(rows.logits)
        counted = shard.across_sum(larger_than(row_logits, x[:, 0], uncounted, rows.changes))
    log_sum, temperatures = flat_read.log_sum, None
    if is_scaled is not None:
        scaled_rows = of_each_row(is_scaled) & (flat_read.temperature != 1)
        temperatures = jnp.where(scaled_rows, flat_read.temperature, jnp.float32(1))
        log_sum = jnp.where(scaled_rows, flat_read.log_scaled, log_sum)
    sums = RowSums(
        flat_read.largest,
        log_sum,
        jnp.where(uncounted, counted, larger),
        flat_read.top_ids,
        flat_read.top_logits,
    )
    everything = jnp.ones(ids.shape[0], bool)
    logprobs = answers.answers(
        Outputs(k), shard.size(width), sums, ids, x, everything, temperatures, log_sum
    )
    return tuple(result.reshape(batch, positions, *result.shape[1:]) for result in logprobs[:4])
