"""The read of sampled rows by TPU kernels: what `xla.groups.read_part` does.

`groups` reads the logits once, for the groups' maxima and sums. If a row needs candidates, the
kernel of calls without sampling reads them once more. Drawing is left to XLA: it
works on [R, V / 256] and [R, 256] numbers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.groups import (
    FEW,
    GroupSums,
    ListedRows,
    Part,
    Read,
    Top,
    as_many_as_needed,
    largest_of,
    read_in_two,
)
from pallas_kernels.backends.mosaic_tpu import groups_kernel
from pallas_kernels.backends.mosaic_tpu.limits import kernel_is_faster
from pallas_kernels.backends.mosaic_tpu.rows import LARGEST, in_rows, in_units, row_sums
from pallas_kernels.backends.mosaic_tpu.schedule import CUT, choose_schedule, must_fit
from pallas_kernels.backends.mosaic_tpu.unit import LOG2_E, Interpret
from pallas_kernels.backends.xla import selection
from pallas_kernels.contract.errors import DoesNotFit
from pallas_kernels.contract.rows import Rows
from pallas_kernels.lowering.forms import vary_like

SumsAndRawSums = tuple[GroupSums, jax.Array]  # [R, G] each; sums at temperature 1, or [R, 0]


def read_part(
    part: Part, k: int, inverse: jax.Array, needed: jax.Array, changes: None = None
) -> tuple[Read, ...]:
    """`xla.groups.read_part`, with the kernels, which take no changes.

    Raises:
      DoesNotFit: the chip's VMEM is too small for the groups; candidates are then left to XLA.
    """

    logits = part.logits

    def by_xla(count: int) -> Top:
        return Top(*selection.select_top_k(logits, None, count, None, selection.from_groups))

    def top(count: int) -> Top:
        if not kernel_is_faster(len(logits), logits.shape[1], min(count, FEW), logits.dtype.name):
            return by_xla(count)
        try:
            return largest_of(row_sums, Rows(logits), count)
        except DoesNotFit:
            return by_xla(count)

    sums = vary_like(read_groups(part, inverse, k >= 0), (part, inverse))
    return (Read(*sums, *as_many_as_needed(part.logits, needed, k, top)),)


def candidates(rows: ListedRows, k: int) -> Top:
    """`read.candidates` of unchanged rows, by the kernel of calls without sampling."""
    targets = Rows(rows.logits, None, rows.row_ids, rows.num_rows)
    return vary_like(largest_of(row_sums, targets, k), rows)


def read_groups(
    part: Part,
    inverse: jax.Array,
    raw: bool,
    interpret: Interpret = False,
    cut: tuple[int, int] = CUT,
) -> SumsAndRawSums:
    """The groups of all rows.

    Where groups end with the columns, or the row ends in its last one, one launch reads the
    columns. Else (`part.tail` has two groups) it reads the whole groups among them, and another one
    the tail.
    """
    read = functools.partial(_groups_of, inverse, raw, interpret, cut)
    if part.tail.shape[1] < 2:
        return read(part.logits, part.logits.shape[1], None)
    return read_in_two(part, read)


def _groups_of(
    inverse: jax.Array,
    raw: bool,
    interpret: Interpret,
    cut: tuple[int, int],
    logits: jax.Array,
    tokens: int,
    offset: jax.Array | None,
) -> SumsAndRawSums:
    """The groups of so many tokens from column `offset` on."""
    rows, dtype = len(logits), logits.dtype.name
    if dtype == "float16":
        logits = logits.astype(jnp.float32)  # in the kernel
    schedule = choose_schedule(
        logits.shape,
        rows,
        0,
        dtype,
        interpreted=bool(interpret),
        gathered=False,
        entropy=False,
        cut=cut,
    )
    must_fit(schedule)
    what = groups_kernel.Groups(tokens, offset is not None, raw)
    scale = jnp.minimum(inverse * jnp.float32(LOG2_E), jnp.float32(LARGEST))
    scale = lax.bitcast_convert_type(scale, jnp.int32)
    constants = jnp.stack([jnp.zeros_like(scale), scale, jnp.zeros_like(scale)], axis=1)
    constants = in_units(
        schedule, jnp.pad(constants, ((0, schedule.num_units * schedule.unit - rows), (0, 0)))
    )
    place = jnp.zeros(1, jnp.int32) if offset is None else offset.reshape(1)
    inputs = vary_like((place, logits, constants), (place, logits, constants))
    outputs = groups_kernel.call(schedule, what, interpret, *inputs)
    maxima, sums, *more = (in_rows(schedule, x)[:rows, : what.number] for x in outputs)
    return GroupSums(maxima, sums), more[0] if raw else sums[:, :0]
