"""`topk_logprobs` by the TPU kernel, which reads the logits once.

The kernel makes the groups' maxima and sums and the top K of each row. XLA gathers the logits of
given tokens and extra ones before, makes rows' sums of the groups' (`row_totals.joined`), and the
outputs (`finish`), from a few numbers a row.

The kernel masks forbidden tokens. Of rows with a bias it reads a changed copy: a group's sum is
that of its changed logits. Where a shard begins inside of a group, the groups take a launch of
their own (`groups_of_rows.read_groups`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.groups import Top
from pallas_kernels.backends.mosaic_tpu import rows_kernel
from pallas_kernels.backends.mosaic_tpu.groups_of_rows import (
    group_sums,
    in_rows,
    in_units,
    read_groups,
    scale_of,
)
from pallas_kernels.backends.mosaic_tpu.schedule import (
    CUT,
    Schedule,
    choose_schedule,
    must_fit,
)
from pallas_kernels.backends.mosaic_tpu.unit import Interpret
from pallas_kernels.backends.row_totals import PartSums, inverse_of, joined
from pallas_kernels.backends.xla.tails import with_following
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.rows import Outputs, Rows, RowSums
from pallas_kernels.lowering.forms import barrier, vary_like
from pallas_kernels.numbers.ordered_keys import limit_of_count


def row_sums(
    rows: Rows,
    selected: jax.Array,
    outputs: Outputs,
    interpret: Interpret = False,
    cut: tuple[int, int] = CUT,
) -> RowSums:
    """`xla.rows.row_sums` on a TPU.

    Raises:
      DoesNotFit: the chip's VMEM is too small.
    """
    part = part_sums(rows, None, jnp.int32(0), selected, outputs, interpret=interpret, cut=cut)
    inverse = inverse_of(rows.temperatures, selected.shape[0])
    return joined(part, inverse, outputs.k, rows.logits.shape[1])


def part_sums(
    rows: Rows,
    following: jax.Array | None,
    offset: jax.Array,
    selected: jax.Array,
    outputs: Outputs,
    interpret: Interpret = False,
    cut: tuple[int, int] = CUT,
) -> PartSums:
    """`xla.rows.part_sums` on a TPU.

    Raises:
      DoesNotFit: the chip's VMEM is too small.
    """
    changes = rows.changes
    biased = changes is not None and changes.bias is not None
    listed = changes is not None or rows.row_ids is not None
    if biased or (listed and following is not None):
        x = barrier(of_logits.apply(rows.logits[rows.places], changes))
        rows = rows._replace(logits=x, row_ids=None, changes=None)
    if following is None:
        return read_rows(rows, selected, outputs, True, interpret, cut)
    inverse = inverse_of(rows.temperatures, selected.shape[0])
    part = with_following(rows.logits, following, offset)
    groups, _ = read_groups(part, inverse, False, interpret, cut, weighted=outputs.entropy)
    sums = read_rows(rows, selected, outputs._replace(entropy=False), False, interpret, cut)
    return sums._replace(groups=groups)


def largest(rows: Rows, k: int, interpret: Interpret = False, cut: tuple[int, int] = CUT) -> Top:
    """The k largest logits of rows; no logit is larger than infinity."""
    infinite = jnp.full(rows.num_targets, jnp.inf, jnp.float32)
    sums = read_rows(rows, infinite, Outputs(k), False, interpret, cut)
    there = sums.top_logits > -jnp.inf
    return Top(jnp.where(there, sums.top_ids, jnp.int32(-1)), sums.top_logits)


def read_rows(
    rows: Rows,
    selected: jax.Array,
    outputs: Outputs,
    grouped: bool,
    interpret: Interpret = False,
    cut: tuple[int, int] = CUT,
) -> PartSums:
    """One launch of the kernel; the groups of rows that are not grouped are none."""
    num_targets, k = selected.shape[0], outputs.k
    logits, row_ids, changes = rows.logits, rows.row_ids, rows.changes
    dtype, read = logits.dtype.name, logits
    if dtype == "float16":  # blocks are of neighbors; and widened in the kernel, not before it
        if row_ids is not None:
            read, row_ids = barrier(logits.at[rows.places].get(mode="clip")), None
        read = read.astype(jnp.float32)
    allowed = None if changes is None else of_logits.unbiased(changes, logits.shape[1])
    schedule = choose_schedule(
        read.shape,
        num_targets,
        k,
        dtype,
        gathered=row_ids is not None,
        entropy=outputs.entropy,
        masked=allowed is not None,
        interpreted=bool(interpret),
        cut=cut,
        grouped=grouped,
    )
    must_fit(schedule)
    count = jnp.full((1,), num_targets, jnp.int32)
    if rows.num_rows is not None:
        count = jnp.clip(rows.num_rows, 0, num_targets).reshape(1)
    first, shift = _rows_to_copy(schedule, row_ids)
    inverse = inverse_of(rows.temperatures, num_targets)
    constants = constants_of_rows(schedule, selected, outputs.inclusive, inverse, shift)
    inputs = [count, first, read, constants]
    if allowed is not None:
        more = (
            schedule.num_batches * schedule.batch_rows - num_targets,
            schedule.words - allowed.shape[1],
        )
        inputs.append(in_units(schedule, jnp.pad(allowed, ((0, more[0]), (0, more[1])))))
    results = rows_kernel.call(schedule, interpret, *vary_like(inputs, inputs))
    larger, values, ids, *groups = (in_rows(schedule, x)[:num_targets] for x in results)
    number = rows_kernel.groups_of(schedule).number if grouped else 0
    return PartSums(
        groups=group_sums(groups or [larger, larger], number),
        num_larger=larger[:, 0].astype(jnp.int32),
        top_ids=ids[:, :k],
        top_logits=values[:, :k],
    )


def _rows_to_copy(schedule: Schedule, row_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The first row of logits to copy for each target, and how far its word must be moved up."""
    if row_ids is None:
        return jnp.zeros(1, jnp.int32), jnp.zeros(schedule.num_targets, jnp.int32)
    last = schedule.num_logits_rows - 1
    rows = jnp.clip(row_ids, 0, last)
    first = rows
    if schedule.is_packed:  # two rows a word
        first = rows & ~1
        if schedule.interpreted:  # there is no row of padding
            first = jnp.minimum(first, max(last - 1, 0))
    shift = jnp.where(rows > first, jnp.int32(0), jnp.int32(16))
    return jnp.pad(first, (0, schedule.num_units * schedule.unit - schedule.num_targets)), shift


def constants_of_rows(
    schedule: Schedule,
    selected: jax.Array,
    inclusive: bool,
    inverse: jax.Array,
    shift: jax.Array,
) -> jax.Array:
    """Numbers of each row for the kernel: [rows of batches, 3] int32, `unit.RowConstants`."""
    limit = limit_of_count(selected, inclusive)
    columns = [lax.bitcast_convert_type(x, jnp.int32) for x in (limit, scale_of(inverse))]
    rows = schedule.num_batches * schedule.batch_rows
    table = jnp.stack([*columns, shift], axis=1)
    return in_units(schedule, jnp.pad(table, ((0, rows - schedule.num_targets), (0, 0))))
