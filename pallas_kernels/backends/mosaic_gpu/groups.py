"""The read of sampled rows in the Pallas Mosaic GPU kernels: what `xla.groups.read_part` does.

Pass 1 (`groups_kernel`) reads the logits once, for the groups' maxima and sums. Pass 2
(`finish_kernel`) selects candidates from the groups, if a row needs any. Drawing is left to XLA: it
works on [R, V / 256] and [R, 256] numbers.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.backends.answers import in_order
from pallas_kernels.backends.groups import (
    FEW,
    MANY,
    GroupSums,
    ListedRows,
    Needed,
    Read,
    RowPart,
    Top,
    as_many_as_needed,
    number_of_groups,
    read_in_two,
    whole_groups,
)
from pallas_kernels.backends.mosaic_gpu import finish_kernel, groups_kernel, row_sum
from pallas_kernels.backends.mosaic_gpu.changes.row_changes import RowChanges, flat_changes
from pallas_kernels.backends.mosaic_gpu.finish_kernel import FinishInputs
from pallas_kernels.backends.mosaic_gpu.groups_kernel import GroupOutputs
from pallas_kernels.backends.mosaic_gpu.reading import RowTargets
from pallas_kernels.backends.mosaic_gpu.rows import groups_of, largest_logits
from pallas_kernels.backends.mosaic_gpu.rows import top_of as columns_of
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule, choose_read_schedule
from pallas_kernels.contract.changes import Changes, biased
from pallas_kernels.contract.changes import of_rows as changes_of_rows
from pallas_kernels.contract.rows import Outputs, Rows
from pallas_kernels.lowering.forms import vary_like


def read_part(
    part: RowPart,
    k: int,
    inverse: jax.Array,
    needed: Needed,
    changes: Changes | None = None,
    schedule: Schedule | None = None,
) -> tuple[Read, ...]:
    """`xla.groups.read_part`, with the kernels.

    Where groups end with the columns, or the row ends in its last one, pass 1 reads the columns
    alone. Else (`part.tail` has two groups) it reads the whole groups among them, and in a launch
    of its own the tail; candidates, which are the columns', then take a read of their own.
    """
    (rows, width), raw = part.logits.shape, k >= 0
    here = flat_changes(changes, width)
    every: tuple[GroupOutputs[jax.Array], ...] = ()
    if part.tail.shape[1] < 2:
        schedule = schedule or choose_read_schedule(rows, width, part.logits.dtype.name)
        every = groups_kernel.read_groups(schedule, part.logits, inverse, raw, changes=here)
        number = whole_groups(part) + part.tail.shape[1]
        found = [groups_of_rows(out, schedule, number) for out in every]
    else:
        assert changes is None
        found = [read_in_two(part, functools.partial(_groups_of, inverse, raw))]
        schedule = None

    def read_of(i: int, groups: GroupSums, raw_sums: jax.Array) -> Read:
        own, words = (changes, here) if i == 0 else (None, None)

        def top(count: int) -> Top:
            if schedule is None:
                found = largest_logits(Rows(part.logits), count)
            else:
                found = top_of_groups(part.logits, schedule, every[i], count, own, words)
            return vary_like(found, (part, inverse, needed))

        sums = vary_like((groups, raw_sums), (part, inverse))
        # What decides nothing gives no candidates but the top k.
        steps = () if i else (FEW, MANY)
        candidates = as_many_as_needed(part.logits, needed.number, k, top, steps)
        return Read(*sums, *candidates, needed.number)

    return tuple(read_of(i, *sums) for i, sums in enumerate(found))


def groups_of_rows(
    out: GroupOutputs[jax.Array], schedule: Schedule, number: int
) -> tuple[GroupSums, jax.Array]:
    """[R, G] of what pass 1 has left, and the sums at temperature 1 [R, G], or [R, 0]."""
    groups = groups_of(out, schedule, number)
    if out.raw_sums is None:
        return groups, groups.sums[:, :0]
    return groups, out.raw_sums.reshape(-1, schedule.padded_groups)[:, :number]


def _groups_of(
    inverse: jax.Array, raw: bool, logits: jax.Array, tokens: int, offset: jax.Array | None
) -> tuple[GroupSums, jax.Array]:
    """`groups_of_rows` of so many tokens from column `offset` on."""
    schedule = choose_read_schedule(len(logits), tokens, logits.dtype.name)
    start = None if offset is None else offset.reshape(1)
    (out,) = groups_kernel.read_groups(schedule, logits, inverse, raw, start)
    return groups_of_rows(out, schedule, number_of_groups(tokens))


def top_of_groups(
    logits: jax.Array,
    schedule: Schedule,
    out: GroupOutputs[jax.Array],
    k: int,
    changes: Changes | None = None,
    words: RowChanges = None,
) -> Top:
    """Pass 2. Of changed rows it takes the tokens without a bias; XLA puts the others back."""
    rows, allowed = logits.shape[0], None
    if words is not None:
        allowed = words.allowed if words.unbiased is None else words.unbiased
    targets = RowTargets(None, None, None)
    sources = row_sum.Sources(out.maxima, out.sums, None)
    inputs = FinishInputs(logits.reshape(-1), None, out.partials, sources, targets, allowed)
    found = finish_kernel.finish_rows(schedule, Outputs(k), "top", inputs, logits.shape, rows)
    ids, values = columns_of(found, rows, k)
    if changes is not None and changes.bias is not None:
        more = biased(logits, jnp.arange(rows, dtype=jnp.int32), changes)
        ids, values = in_order(ids, values, *more, k)
    return Top(jnp.where(values > -jnp.inf, ids, jnp.int32(-1)), values)


def candidates(rows: ListedRows, k: int) -> Top:
    """`read.candidates` of valid rows, by both passes of a call that leaves sums to XLA."""
    logits, row_ids, num_rows, changes = rows
    assert row_ids is not None
    targets = Rows(logits, None, row_ids, num_rows, changes=changes_of_rows(changes, row_ids))
    return vary_like(largest_logits(targets, k), rows)
