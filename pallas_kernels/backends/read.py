"""The reads of rows and what follows them, by the backend that the call and the platform choose.

Each is one job of `choose.kernels_or_xla`: the greedy and the given token's logprobs, a part's
sums, the groups of sampled rows, candidates, a draw from groups, and a count of larger logits.
"""

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import jax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.backends.choose import KERNELS, kernels_or_xla
from pallas_kernels.backends.groups import (
    FEW,
    Drawn,
    ListedRows,
    Needed,
    Read,
    RowPart,
    RowsToDraw,
    Top,
)
from pallas_kernels.backends.row_totals import PartSums
from pallas_kernels.backends.xla import groups
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs, Rows, RowSums
from pallas_kernels.lowering.forms import Tree

_Arrays = TypeVar("_Arrays", bound=Tree)
_Result = TypeVar("_Result", bound=Tree)
MOST_GROUPS = 4096  # of a row, that a warpgroup holds in registers: 1,048,576 tokens
MOST_TAKEN = 128  # tokens of a row, one a thread


def read_groups(
    part: RowPart,
    inverse: jax.Array,
    needed: Needed,
    k: int,
    changes: Changes | None = None,
) -> tuple[Read, ...]:
    """`xla.groups.read_part` in the kernels, in programs that are lowered for CUDA or a TPU.

    Sums differ between implementations by rounding; within one, a group's do not depend on rows,
    dtype, K, vocabulary or shard. The TPU's kernels take no changes.

    Args:
      part: the logits.
      inverse: `inverse_temperature` of each row.
      needed: of each row; on kernels all that it may need.
      k, changes: as for `xla.groups.read_part`.
    """
    return kernels_or_xla(
        "groups",
        lambda kernels, part, *rows: kernels.read_part(part, k, *rows),
        lambda part, *rows: groups.read_part(part, k, *rows),
        part,
        inverse,
        needed,
        changes,
        logits=part.logits,
        backends=tuple(KERNELS) if changes is None else ("mosaic_gpu",),
    )


def row_sums(
    rows: Rows,
    selected: Float32[Array, " R"],
    outputs: Outputs,
    backends: tuple[str, ...] = tuple(KERNELS),
) -> RowSums:
    """`xla.rows.row_sums`, by one of the backends where it is faster."""
    logits = rows.logits
    sums: RowSums = kernels_or_xla(
        "rows",
        lambda kernels, rows, selected: kernels.row_sums(rows, selected, outputs),
        lambda rows, selected: xla.row_sums(rows, selected, outputs),
        rows,
        selected,
        logits=logits,
        backends=backends,
        size=(selected.shape[0], outputs.k),
    )
    return sums


def part_sums(
    rows: Rows,
    following: jax.Array | None,
    offset: jax.Array,
    selected: Float32[Array, " R"],
    outputs: Outputs,
) -> PartSums:
    """`xla.rows.part_sums`, by one of the backends where it is faster."""
    logits = rows.logits

    def by_kernels(kernels: ModuleType, rows: Rows, *rest: jax.Array) -> PartSums:
        sums: PartSums = kernels.part_sums(rows, *rest, outputs)
        return sums

    def by_xla(
        rows: Rows, following: jax.Array | None, offset: jax.Array, selected: jax.Array
    ) -> PartSums:
        return xla.part_sums(rows, following, offset, selected, outputs)

    return kernels_or_xla(
        "rows",
        by_kernels,
        by_xla,
        rows,
        following,
        offset,
        selected,
        logits=logits,
        size=(selected.shape[0], outputs.k),
    )


def candidates(rows: ListedRows, k: int, *, valid: bool) -> Top:
    """The k largest logits of rows, and their ids; see `selection.select_top_k`.

    Args:
      rows: of a list; the TPU's kernels take no changes.
      k: static.
      valid: static; whether these rows are. The GPU kernels, which find nothing in others, are for
        valid rows.
    """
    # More candidates than the stacks hold take K sweeps in VMEM: XLA would sort the rows for them.
    assert rows.row_ids is not None
    able = {"mosaic_gpu": valid, "mosaic_tpu": k > 0 and rows.changes is None}
    top: Top = kernels_or_xla(
        "groups",
        lambda kernels, rows: kernels.candidates(rows, k),
        lambda rows: groups.candidates(rows, k),
        rows,
        logits=rows.logits,
        backends=tuple(name for name in able if able[name]),
        size=(rows.row_ids.shape[0], min(k, FEW)),
    )
    return top


def draw(
    slots: RowsToDraw,
    arrays: _Arrays,
    purposes: tuple[int, int],
    by_xla: Callable[[_Arrays], _Result],
    logits: Float[Array, "N V"],
    after: Callable[[Drawn, _Arrays], _Result],
    changes: Changes | None = None,
) -> _Result:
    """A token of each slot's row, of rows that are whole on a device.

    The kernel needs at most `MOST_GROUPS` groups and `MOST_TAKEN` taken tokens; elsewhere XLA does
    it. Both draw the same but where rounding of float32 decides.

    Args:
      slots: with a row each.
      arrays: a tree of arrays.
      purposes: static; of the noise of groups, and of that of tokens.
      by_xla: what XLA does, a function of `arrays`.
      logits: the rows.
      after: what follows the kernel, a function of its result and of `arrays`.
      changes: of the N rows.
    """
    fits = slots.maxima.shape[1] <= MOST_GROUPS and slots.excluded_ids.shape[1] <= MOST_TAKEN
    if not fits:
        return by_xla(arrays)
    return kernels_or_xla(
        "draw",
        lambda kernels, logits, slots, changes, arrays: after(
            kernels.draw(logits, slots, purposes, changes), arrays
        ),
        lambda *slots: by_xla(slots[-1]),
        logits,
        slots,
        changes,
        arrays,
        logits=logits,
        backends=("mosaic_gpu",),
    )


def num_larger(
    logits: Float[Array, "N V"],
    maxima: Float32[Array, "N G"],
    token_ids: Int32[Array, " N"],
    changes: Changes | None = None,
) -> Int32[Array, " N"]:
    """How many logits of each row are strictly larger than its token's; 0 without a token.

    Args:
      logits: the rows, whole.
      maxima: of their groups. The kernel reads those groups alone that have a larger logit.
      token_ids: -1 where nothing is counted; other rows are valid.
      changes: of the rows, as the maxima are.
    """
    if maxima.shape[1] > MOST_GROUPS:
        return groups.larger_than_tokens(logits, token_ids, changes)
    counts: Int32[Array, " N"] = kernels_or_xla(
        "count_larger",
        lambda kernels, *arguments: kernels.count_larger(*arguments),
        lambda logits, _, *rows: groups.larger_than_tokens(logits, *rows),
        logits,
        maxima,
        token_ids,
        changes,
        logits=logits,
        backends=("mosaic_gpu",),
    )
    return counts
