"""The read of sampled rows in the Pallas Mosaic GPU kernels: what `xla.groups.read_part` does.

Pass 1 (`groups_kernel`) reads the logits once, for the groups' maxima and sums. Pass 2
(`finish_kernel`) selects candidates from the groups, if a row needs any. Drawing is left to XLA: it
works on [R, V / 256] and [R, 256] numbers.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backends.groups import (
    GroupSums,
    Part,
    Read,
    Top,
    as_many_as_needed,
    top_of,
    whole_groups,
)
from pallas_kernels.backends.mosaic_gpu import finish_kernel, groups_kernel
from pallas_kernels.backends.mosaic_gpu.finish_kernel import Inputs
from pallas_kernels.backends.mosaic_gpu.groups_kernel import GroupOutputs
from pallas_kernels.backends.mosaic_gpu.reading import make_targets
from pallas_kernels.backends.mosaic_gpu.rows import part_sums, row_sums
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule, choose_fixed_schedule
from pallas_kernels.contract.rows import Outputs, Rows
from pallas_kernels.lowering.forms import vary_like


def read_part(
    part: Part, inverse: jax.Array, needed: jax.Array, k: int, schedule: Schedule | None = None
) -> Read:
    """`xla.groups.read_part`, with the kernels.

    Where groups end with the columns, or the row ends in its last one, pass 1 reads the columns
    alone. Else (`part.tail` has two groups) it reads the whole groups among them, and in a launch
    of its own the tail; candidates, which are the columns', then take a read of their own.
    """
    raw, rows = k >= 0, part.logits.shape[0]
    if part.tail.shape[1] < 2:
        schedule = schedule or choose_fixed_schedule(
            rows, part.logits.shape[1], part.logits.dtype.name
        )
        out = groups_kernel.read_groups(schedule, part.logits, inverse, raw)
        groups, raw_sums = of_rows(out, schedule, whole_groups(part) + part.tail.shape[1])
    else:
        groups, raw_sums = _split_groups(part, inverse, raw)

    def top(count: int) -> Top:
        if part.tail.shape[1] == 2:
            found = _largest(Rows(part.logits), count)
        else:
            assert schedule is not None
            found = top_of_groups(part.logits, schedule, out, count)
        return vary_like(found, (part, inverse, needed))

    return Read(
        *vary_like((groups, raw_sums), (part, inverse)),
        *as_many_as_needed(part.logits, needed, k, top),
    )


def of_rows(out: GroupOutputs, schedule: Schedule, number: int) -> tuple[GroupSums, jax.Array]:
    """[R, G] of what pass 1 has left, and the sums at temperature 1 [R, G], or [R, 0]."""

    def of_row(x: jax.Array) -> jax.Array:
        return x.reshape(-1, schedule.padded_groups)[:, :number]

    sums = of_row(out.sums)
    raw = sums[:, :0] if out.raw_sums is None else of_row(out.raw_sums)
    return GroupSums(of_row(out.maxima).astype(jnp.float32), sums), raw


def _split_groups(part: Part, inverse: jax.Array, raw: bool) -> tuple[GroupSums, jax.Array]:
    """`of_rows` of columns that begin or end inside a group."""
    rows, width = part.tail.shape[0], part.tail.shape[1] * part.tail.shape[2]
    dtype, whole = part.logits.dtype.name, whole_groups(part)
    tail = choose_fixed_schedule(rows, width, dtype)
    out = groups_kernel.read_groups(tail, part.tail.reshape(rows, width), inverse, raw)
    last = of_rows(out, tail, part.tail.shape[1])
    if not whole:
        return last
    schedule = choose_fixed_schedule(rows, whole * part.tail.shape[2], dtype)
    offset = part.offset.reshape(1)
    out = groups_kernel.read_groups(schedule, part.logits, inverse, raw, offset)
    both = of_rows(out, schedule, whole), last
    joined: tuple[GroupSums, jax.Array] = jax.tree.map(
        lambda x, y: jnp.concatenate([x, y], axis=1), *both
    )
    return joined


def top_of_groups(logits: jax.Array, schedule: Schedule, out: GroupOutputs, k: int) -> Top:
    """Pass 2."""
    rows = logits.shape[0]
    inputs = Inputs(
        logits.reshape(-1), None, out.partials, out.maxima, make_targets(None, None, None)
    )
    found = finish_kernel.finish_rows(schedule, Outputs(k), "parts", inputs, rows, rows)
    return top_of(part_sums(found, rows, k))


def candidates(logits: jax.Array, row_ids: jax.Array, num_rows: jax.Array, k: int) -> Top:
    """`read.candidates` of valid rows, by both passes of a call without sampling."""
    found = _largest(Rows(logits, None, row_ids, num_rows), k)
    return vary_like(found, (logits, row_ids, num_rows))


def _largest(rows: Rows, k: int) -> Top:
    """Both passes of a call without sampling; no logit is larger than infinity."""
    nothing = jnp.full(rows.num_targets, jnp.inf, jnp.float32)
    return top_of(row_sums(rows, nothing, Outputs(k)))
