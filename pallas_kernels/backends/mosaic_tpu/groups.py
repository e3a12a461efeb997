"""The read of sampled rows by TPU kernels: what `xla.groups.read_part` does.

`groups` reads the logits once, for the groups' maxima and sums. If a row needs candidates, the
kernel of calls without sampling reads them once more. Drawing is left to XLA: it
works on [R, V / 256] and [R, 256] numbers.
"""

import jax

from pallas_kernels.backends.groups import (
    FEW,
    ListedRows,
    Needed,
    Read,
    RowPart,
    Top,
    as_many_as_needed,
)
from pallas_kernels.backends.mosaic_tpu.groups_of_rows import read_groups
from pallas_kernels.backends.mosaic_tpu.limits import kernel_is_faster
from pallas_kernels.backends.mosaic_tpu.rows import largest
from pallas_kernels.backends.xla import selection
from pallas_kernels.contract.errors import DoesNotFit
from pallas_kernels.contract.rows import Rows
from pallas_kernels.lowering.forms import vary_like


def read_part(
    part: RowPart, k: int, inverse: jax.Array, needed: Needed, changes: None = None
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
            return largest(Rows(logits), count)
        except DoesNotFit:
            return by_xla(count)

    sums = vary_like(read_groups(part, inverse, k >= 0), (part, inverse))
    candidates = as_many_as_needed(part.logits, needed.number, k, top)
    return (Read(*sums, *candidates, needed.number),)


def candidates(rows: ListedRows, k: int) -> Top:
    """`read.candidates` of unchanged rows, by the kernel of calls without sampling."""
    targets = Rows(rows.logits, None, rows.row_ids, rows.num_rows)
    return vary_like(largest(targets, k), rows)
