"""`topk_logprobs` by the TPU kernel, which reads the logits once.

The kernel makes statistics and the top K of each row. XLA gathers the logits of given tokens and
extra ones before, and makes the outputs after it (`finish`), from a few numbers a row.

The kernel masks forbidden tokens, and those that a bias names: XLA puts these back (`parts`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import with_biased
from pallas_kernels.backends.mosaic_tpu import rows_kernel
from pallas_kernels.backends.mosaic_tpu.schedule import (
    CUT,
    SUBLANES,
    Schedule,
    choose_schedule,
    must_fit,
)
from pallas_kernels.backends.mosaic_tpu.unit import LOG2_E, Interpret
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.rows import Outputs, Rows, RowSums
from pallas_kernels.lowering.forms import barrier, vary_like
from pallas_kernels.numbers.ordered_keys import limit_of_count

LN_2 = 0.6931471805599453
LARGEST = 3.4028234663852886e38  # float32


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
    )
    must_fit(schedule)
    count = jnp.full((1,), num_targets, jnp.int32)
    if rows.num_rows is not None:
        count = jnp.clip(rows.num_rows, 0, num_targets).reshape(1)
    first, shift = _rows_to_copy(schedule, row_ids)
    constants = constants_of_rows(schedule, selected, outputs.inclusive, rows.temperatures, shift)
    inputs = [count, first, read, constants]
    if allowed is not None:
        more = (
            schedule.num_batches * schedule.batch_rows - num_targets,
            schedule.words - allowed.shape[1],
        )
        inputs.append(in_units(schedule, jnp.pad(allowed, ((0, more[0]), (0, more[1])))))
    results = rows_kernel.call(schedule, interpret, *vary_like(inputs, inputs))
    stats, values, ids = (in_rows(schedule, x)[:num_targets] for x in results)
    sums = RowSums(
        maximum=stats[:, 0],
        sum_exp=stats[:, 2],
        num_larger=stats[:, 1].astype(jnp.int32),
        top_ids=ids[:, :k],
        top_logits=values[:, :k],
        weighted=stats[:, 3] * jnp.float32(LN_2) if outputs.entropy else None,
    )
    return with_biased(sums, rows, selected, outputs)


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
    temperatures: jax.Array | None,
    shift: jax.Array,
) -> jax.Array:
    """What the kernel takes of each row: [rows of batches, 3] int32, `unit.RowConstants`."""
    limit = limit_of_count(selected, inclusive)
    scale = jnp.full(selected.shape, LOG2_E, jnp.float32)
    if temperatures is not None:  # finite in any case: a bad temperature makes no row invalid
        inverse = LOG2_E / jnp.where(temperatures > 0, temperatures, jnp.float32(1))
        scale = jnp.minimum(inverse, jnp.float32(LARGEST))
    columns = [lax.bitcast_convert_type(x, jnp.int32) for x in (limit, scale)]
    rows = schedule.num_batches * schedule.batch_rows
    table = jnp.stack([*columns, shift], axis=1)
    return in_units(schedule, jnp.pad(table, ((0, rows - schedule.num_targets), (0, 0))))


def in_units(schedule: Schedule, x: jax.Array) -> jax.Array:
    """x [rows, n] in the kernel's order: of each unit first the even, then the odd rows."""
    if schedule.halves == 1:
        return x
    return x.reshape(-1, SUBLANES, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def in_rows(schedule: Schedule, x: jax.Array) -> jax.Array:
    """The inverse of `in_units`."""
    if schedule.halves == 1:
        return x
    return x.reshape(-1, 2, SUBLANES, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
