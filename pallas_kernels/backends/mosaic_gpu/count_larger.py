"""Token ranks of rows that were read before their tokens were known: one kernel, a program a row.

A token that is drawn is known only after the read. The groups whose maximum is above its logit hold
all that is larger, so only they are read again: none for the most likely token, a few for most.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.groups import WIDTH
from pallas_kernels.backends.mosaic_gpu import chosen_groups, compat
from pallas_kernels.backends.mosaic_gpu.changes.row_changes import RowChanges, flat_changes
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.schedule import Index, Schedule, choose_read_schedule
from pallas_kernels.backends.mosaic_gpu.thread import load_at_once
from pallas_kernels.contract.changes import Changes


def count_larger(
    logits: jax.Array, maxima: jax.Array, token_ids: jax.Array, changes: Changes | None = None
) -> jax.Array:
    """How many logits of each row are strictly larger than its token's; 0 where it has none.

    Args:
      logits: [R, V].
      maxima: [R, G] float32, of the groups.
      token_ids: [R] int32; -1 where nothing is counted.
      changes: of the rows.
    """
    rows, vocabulary = logits.shape
    schedule = choose_read_schedule(rows, vocabulary, logits.dtype.name)
    kernel = GPU.kernel(
        functools.partial(_count_larger_kernel, schedule=schedule, number=maxima.shape[1]),
        out_type=[compat.shape((rows,), jnp.int32)],
        scratch_types=chosen_groups.scratch_types(maxima.shape[1]),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=compat.compiler_params(approx_math=False),
        kernel_name="count_larger",
    )
    words = flat_changes(changes, vocabulary)
    (counts,) = kernel(logits.reshape(-1), maxima.reshape(-1), token_ids, words)
    return compat.asarray(counts)


def _count_larger_kernel(
    logits_ref: jax.Ref,  # [R * V]  in
    maxima_ref: jax.Ref,  # [R * G] f32  in
    token_ids_ref: jax.Ref,  # [R] i32  in
    changes: RowChanges,  # in
    counts_ref: jax.Ref,  # [R] i32  out
    *scratch: jax.Ref,  # of `Chosen`  shared memory
    schedule: Schedule,
    number: int,
) -> None:
    target = lax.axis_index("row")
    first = target * schedule.vocabulary
    row = chosen_groups.Row(schedule, logits_ref, first, changes, target)
    token = load_at_once(token_ids_ref, target)
    maxima = chosen_groups.load_groups(maxima_ref, target, number, -jnp.inf)

    @pl.when(token >= 0)
    def _() -> None:
        if changes is None:
            least = compat.asarray(logits_ref[first + token].astype(jnp.float32))
        else:
            x, ids, _ = row.group(token // WIDTH)
            least = jnp.max(jnp.where(ids == token, x, -jnp.inf))
        nothing = compat.cast(jnp.zeros(schedule.piece, jnp.int32), row.layout)
        chosen = chosen_groups.Chosen(*scratch)
        work = functools.partial(_counted, row, least)
        counts = chosen_groups.over_groups(row, chosen, maxima > least, work, nothing)
        counts_ref[target] = jnp.sum(jnp.sum(counts, axis=1))

    @pl.when(token < 0)
    def _() -> None:
        counts_ref[target] = jnp.int32(0)


def _counted(
    row: chosen_groups.Row, least: jax.Array, _: Index, groups: jax.Array, counts: jax.Array
) -> jax.Array:
    """The counts with those of some more groups, in each place of a piece."""
    for piece in row.pieces(groups):
        larger = piece.astype(jnp.float32) > least
        counts = counts + jnp.where(larger, jnp.int32(1), jnp.int32(0))
    return counts
