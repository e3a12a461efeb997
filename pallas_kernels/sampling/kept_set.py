"""The kept set of a row: the token ids that its processed distribution kept, ascending.

A `Truncation` says which tokens these are. To list them takes one read of the row, which counts
them in groups of columns, and then a look at the groups that hold the ids wanted. Nothing is
sorted, and nothing has the vocabulary's size: temporaries are a block of counts and of ids.

Axes: N rows of logits, R rows wanted, V vocabulary, M ids of a set, b rows of a block, G groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends import answers
from pallas_kernels.contract.arguments import array_of
from pallas_kernels.contract.changes import Changes, apply, of_columns, of_rows
from pallas_kernels.contract.field_docs import with_field_docs
from pallas_kernels.contract.rows import check_changes, check_matrix, check_num_rows
from pallas_kernels.lowering.forms import map_blocks, pin_to_iteration, rows_from, vary_like
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.lowering.row_pieces import filled
from pallas_kernels.meshes.placement import WHOLE, VocabShard
from pallas_kernels.sampling import door
from pallas_kernels.sampling.parameters import Truncation

MAX_KEPT = 1024  # token ids of a row; more are a mark
# Marks, instead of a count of ids: nothing was cut; more than `MAX_KEPT` are left.
KEPT_ALL, KEPT_MANY = -1, -2


@with_field_docs
class PaddedKept(NamedTuple):
    """Kept sets of rows [...], of width M.

    Attributes:
      token_ids: ascending; -1 from the row's count on.
      counts: ids, or a mark; 0 where there is no token.
      log_kept: of the kept tokens' share; 0 without one.
    """

    token_ids: Int32[jax.Array | np.ndarray, "*rows M"]
    counts: Int32[jax.Array | np.ndarray, "*rows"]
    log_kept: Float32[jax.Array | np.ndarray, "*rows"]


_GROUP = 64  # columns whose kept tokens are counted together
KEPT_BLOCK = 16  # rows at a time: the work follows the number of rows that were asked for
LISTED = 128  # ids of each row that are listed at a time: most sets are smaller


class _Sets(NamedTuple):
    """R sets, or what one shard's columns hold of them."""

    ids: Int32[Array, "R M"]  # of the whole vocabulary; anything from the count on
    counts: Int32[Array, " R"]


def kept_sets(
    logits: Float[Array, "N V"],
    rows: Int32[Array, " R"],
    num_rows: Int32[Array, ""] | int,
    cut: Truncation,
    *,
    shard: VocabShard = WHOLE,
    allowed: Int32[Array, "N _"] | None = None,
    bias_token_ids: Int32[Array, "N I"] | None = None,
    bias: Float32[Array, "N I"] | None = None,
) -> PaddedKept:
    """The kept sets of some rows of logits.

    A set holds the kept tokens with a logit above -inf, in ascending order of their ids: so two
    sets are equal where their ids are, shards follow one another, and a learner finds a token by
    its id. A greedy row and an invalid one keep one token, and their logits are not read.

    Args:
      logits: bfloat16, float16 or float32; on a vocabulary shard, its columns.
      rows: which rows of the logits; from `num_rows` on, anything.
      num_rows: how many sets are wanted.
      cut: [R], the truncations of these rows.
      shard: the columns of each row that this device holds.
      allowed, bias_token_ids, bias: changes of the logits, as `verify` had them.

    Returns:
      [R] sets of M = min(1024, V) ids, -1 from the count on. The count is `KEPT_ALL` where the
      whole vocabulary was kept, `KEPT_MANY` where a part was that is larger than 1024, and 0 in the
      rows from `num_rows` on. `log_kept` is that of the cut.
    """
    door.check_shard(shard)
    logits = check_matrix("logits", logits, "[N, V]")
    rows = array_of("rows", rows, "integers", ("R",), "the rows that are wanted, [R]")
    num_rows, cut = check_num_rows(num_rows), door.cut_of(cut, rows.shape)
    changes = door.checked_changes(allowed, bias_token_ids, bias, logits.shape[:-1])
    return compiled(_kept_sets, shard)(logits, rows, num_rows, cut, changes)


def _kept_sets(
    shard: VocabShard,
    logits: jax.Array,
    rows: jax.Array,
    num_rows: jax.Array,
    cut: Truncation,
    unchecked: Changes,
) -> PaddedKept:
    """`kept_sets` of this device's columns."""
    logits, shard = shard.without_padding(logits)
    vocab_size = shard.size(logits.shape[1])
    width = min(MAX_KEPT, vocab_size)
    is_listed = jnp.arange(rows.shape[0], dtype=jnp.int32) < num_rows
    is_single = cut.cut_logit == jnp.inf
    changes = check_changes(*unchecked, len(logits), vocab_size)

    no_sets = _Sets(jnp.zeros((rows.shape[0], width), jnp.int32), jnp.zeros_like(rows))

    def searched() -> _Sets:
        """Within this shard's columns block after block, then joined."""
        x, row_changes = (
            shard.masked(logits),
            answers.changes_of_shard(changes, shard, logits.shape[1]),
        )
        block = min(KEPT_BLOCK, rows.shape[0])

        def work(start: jax.Array) -> _Sets:
            part = rows_from((rows, cut), start, block)
            return _block(pin_to_iteration(x, start), row_changes, *part, width, shard)

        inputs = (x, rows, cut, shard.ids(logits.shape[1]))
        return join_kept(map_blocks(work, block, num_rows, no_sets, inputs), shard)

    # A batch of greedy requests reads no logits.
    sets: _Sets = lax.cond(
        jnp.any(is_listed & ~is_single), searched, lambda: vary_like(no_sets, cut.cut_id)
    )
    counts = jnp.where(sets.counts > width, KEPT_MANY, sets.counts)
    counts = jnp.where(sets.counts == vocab_size, KEPT_ALL, counts)
    counts = jnp.where(is_listed, jnp.where(is_single, 1, counts), 0)
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    ids = jnp.where(is_single[:, None], cut.cut_id[:, None], sets.ids)
    ids = jnp.where(column < counts[:, None], ids, -1)
    return PaddedKept(ids, counts, jnp.where(is_listed, cut.log_kept, 0.0))


def join_kept(sets: _Sets, shard: VocabShard) -> _Sets:
    """The sets of all shards: each one's ids follow those of the shards before it."""
    if shard.axis_name is None:
        return sets
    counts = shard.gathered(sets.counts)  # [shards, R]
    shard_index = lax.axis_index(shard.axis_name)
    earlier = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None] < shard_index
    before = jnp.where(earlier, counts, 0).sum(0, dtype=jnp.int32)
    place = jnp.arange(sets.ids.shape[1], dtype=jnp.int32)[None, :] - before[:, None]
    is_on_shard = (place >= 0) & (place < sets.counts[:, None])
    shifted = jnp.take_along_axis(sets.ids, jnp.maximum(place, 0), axis=1)
    ids = shard.across_sum(jnp.where(is_on_shard, shifted, 0))
    return _Sets(ids, counts.sum(0, dtype=jnp.int32))


def _block(
    logits: Float[Array, "N V"],
    changes: Changes | None,
    rows: Int32[Array, " b"],
    cut: Truncation,
    width: int,
    shard: VocabShard,
) -> _Sets:
    """The sets of the rows of one block within this shard's columns."""
    columns = logits.shape[1]
    first_id = shard.ids(columns)[0]

    def keeps(x: jax.Array, ids: jax.Array) -> jax.Array:
        return cut.keeps(x, ids) & (x > -jnp.inf)

    row_changes = of_rows(changes, rows)
    row_logits = apply(logits.at[rows].get(mode="fill", fill_value=-jnp.inf), row_changes).astype(
        jnp.float32
    )
    ids = first_id + jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), row_logits.shape)
    ends = jnp.cumsum(_counts(keeps(row_logits, ids)), axis=1, dtype=jnp.int32)  # [b, G]
    counts = ends[:, -1]

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """List ids `start` to `start + LISTED` of each row."""
        start, ids = carry
        place = start + jnp.arange(LISTED, dtype=jnp.int32)
        group = jax.vmap(lambda e: jnp.searchsorted(e, place, side="right"))(ends)
        group = jnp.minimum(group.astype(jnp.int32), ends.shape[1] - 1)
        before = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), group, axis=1)
        in_group = jnp.arange(_GROUP, dtype=jnp.int32)[None, None, :]
        column = group[:, :, None] * _GROUP + in_group
        pinned = pin_to_iteration(logits, start)
        x = pinned.at[rows[:, None, None], column].get(mode="fill", fill_value=-jnp.inf)
        batch = column.shape[0]
        if row_changes is not None:
            group_rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), LISTED)
            group_changes = of_columns(
                of_rows(row_changes, group_rows), (group * _GROUP).reshape(-1), _GROUP
            )
            x = apply(x.reshape(-1, _GROUP), group_changes).reshape(x.shape)
        kept = keeps(
            x.astype(jnp.float32).reshape(batch, -1), (first_id + column).reshape(batch, -1)
        ).reshape(column.shape)
        rank = jnp.cumsum(kept, axis=2, dtype=jnp.int32)
        is_it = kept & (rank == (place[None, :] - before + 1)[:, :, None])
        token_ids = first_id + group * _GROUP + jnp.argmax(is_it, axis=2).astype(jnp.int32)
        return start + LISTED, lax.dynamic_update_slice_in_dim(ids, token_ids, start, 1)

    # Sets that are too large are not listed.
    last = jnp.max(jnp.where(counts > width, 0, counts))
    room = -(-width // LISTED) * LISTED
    first = (jnp.int32(0), jnp.zeros((rows.shape[0], room), jnp.int32))
    ids = lax.while_loop(lambda carry: carry[0] < last, step, vary_like(first, ends))[1]
    return _Sets(ids[:, :width], counts)


def _counts(kept: Bool[Array, "b V"]) -> Int32[Array, "b G"]:
    """How many tokens of each group of columns are kept."""
    padded = filled(kept, -(-kept.shape[1] // _GROUP) * _GROUP, False)
    return padded.reshape(kept.shape[0], -1, _GROUP).sum(2, dtype=jnp.int32)
