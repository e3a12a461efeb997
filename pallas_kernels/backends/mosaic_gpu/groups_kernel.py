"""Pass 1 of rows that are sampled: one read yields each group's maximum and sum of exponentials.

A group is 256 logits from a multiple of 256 on, in every row, and its sum is relative to its own
maximum: so no program keeps anything of its groups but what it writes. The order of additions is
fixed by the places of logits in their group: a thread adds the four runs of 8 logits that it holds,
64 apart, then the 8 sums, then 8 threads theirs, always in pairs. So a sum's bits depend on the
group's logits and the temperature alone; not on rows, dtype, vectors, programs, or the row's place.

Where logits are changed, a block is changed after it was loaded; where the logits' own groups are
wanted too, the same block leaves both.
"""

import functools
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.reading import (
    LARGEST,
    LOG2_E,
    RowChanges,
    changed,
    read_block,
    read_fixed_edge,
)
from pallas_kernels.backends.mosaic_gpu.rows_kernel import finite_reference, partials_size
from pallas_kernels.backends.mosaic_gpu.schedule import RUN, Index, Layout, Schedule
from pallas_kernels.backends.mosaic_gpu.thread import Vector, load_at_once

Output = TypeVar("Output")  # an array; in the kernel its reference
Scales = tuple[jax.Array, ...]  # of exponents: one of each sum


class GroupOutputs(NamedTuple, Generic[Output]):
    """What pass 1 leaves of R rows; of a row's `padded_groups` places `num_groups` are written."""

    partials: Output  # as `rows_kernel.read_rows` has it, for pass 2: see `Carry`; counts are 0
    maxima: Output  # [R * padded_groups] in the logits' dtype, rounded down to it
    sums: Output  # [R * padded_groups] f32
    raw_sums: Output | None = None  # [R * padded_groups] f32: at temperature 1
    exact_maxima: Output | None = None  # [R * padded_groups] f32, where `maxima` are rounded


class Carry(NamedTuple):
    """What a program keeps between steps, [groups of a block] float32."""

    maximum: jax.Array
    # Sums of the groups' sums, each as it is: above 0 where a logit is above -inf, NaN where a row
    # has a NaN or +inf. Pass 2 asks for no more.
    evidence: jax.Array


Carries = tuple[Carry, ...]  # of each of the outputs


def read_groups(
    schedule: Schedule,
    logits: jax.Array,
    inverse: jax.Array,
    raw: bool,
    offset: jax.Array | None = None,
    changes: RowChanges = None,
) -> tuple[GroupOutputs[jax.Array], ...]:
    """The groups of all rows: as they are changed and, with `raw`, as they are.

    Args:
      schedule: a fixed one; its vocabulary is the number of columns that are read.
      logits: [R, columns or more].
      inverse: [R] float32, `inverse_temperature`.
      raw: whether the sums at temperature 1 are wanted too, of the logits as they are. They cost a
        second exponential in rows of other temperatures, and a second store in the others.
      offset: [1] int32, the column of the first group; `offset` + `schedule.vocabulary` columns are
        there, and 256 and it have no fewer factors of 2 in common than 256 and the row's width.
        None: 0.
      changes: of whole rows. None: what is changed is what there is.
    """
    num_targets, width = logits.shape
    size = num_targets * schedule.padded_groups
    sums = compat.shape((size,), jnp.float32)
    plain = GroupOutputs(
        compat.shape((partials_size(schedule, num_targets, entropy=False),), jnp.float32),
        compat.shape((size,), logits.dtype),
        sums,
    )
    wanted = [plain._replace(raw_sums=sums)] if raw else [plain]
    if changes is not None:
        rounds = changes.bias is not None and logits.dtype != jnp.float32
        wanted = [plain._replace(exact_maxima=sums if rounds else None), *wanted[: int(raw)]]
    types, tree = jax.tree.flatten(tuple(wanted))
    kernel = GPU.kernel(
        functools.partial(
            _read_groups_kernel, schedule=schedule, width=width, num_targets=num_targets, tree=tree
        ),
        out_type=types,
        grid=(schedule.programs, num_targets),  # the last axis may exceed 65535, no other may
        grid_names=("program", "row"),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="read_groups",
    )
    found = kernel(logits.reshape(-1), inverse, offset, changes)
    return jax.tree.unflatten(tree, found)  # type: ignore[no-any-return]


class RowOfGroups(NamedTuple):
    """What a program knows of the row that it reads, in the kernel."""

    schedule: Schedule
    logits_ref: jax.Ref  # [R * width]
    first: Index  # where the row's first group begins
    groups: Index  # where its groups are written
    outputs: tuple[GroupOutputs[jax.Ref], ...]
    scales: Scales  # at the row's temperature and at 1; one where these are the same
    vector: int  # logits that every row's threads can load at once
    changes: RowChanges
    target: Index  # which row


def _read_groups_kernel(
    logits_ref: jax.Ref,  # [R * width]  in
    inverse_ref: jax.Ref,  # [R] f32  in
    offset_ref: jax.Ref | None,  # [1] i32  in, or None
    changes: RowChanges,  # in
    *outputs: jax.Ref,  # out, as `tree` of `GroupOutputs`
    schedule: Schedule,
    width: int,
    num_targets: int,
    tree: jax.tree_util.PyTreeDef,
) -> None:
    target = lax.axis_index("row")
    program = lax.axis_index("program")
    inverse = compat.asarray(load_at_once(inverse_ref, target))
    first = target * width
    if offset_ref is not None:
        first = first + offset_ref[0]
    row = RowOfGroups(
        schedule,
        logits_ref,
        first,
        target * schedule.padded_groups,
        jax.tree.unflatten(tree, outputs),
        (jnp.minimum(inverse * LOG2_E, jnp.float32(LARGEST)),),
        schedule.common_vector(width),
        changes,
        target,
    )

    def write(carries: Carries) -> None:
        for out, carry in zip(row.outputs, carries, strict=True):
            results = jnp.max(carry.maximum), jnp.sum(carry.evidence), jnp.float32(0)
            for i, result in enumerate(results):
                place = (i * num_targets + target) * schedule.programs + program
                out.partials[place] = result

    def read_with(scales: Scales) -> None:
        here = row._replace(scales=scales)
        if schedule.splits:
            pl.when(program < schedule.splits)(lambda: write(read_steps(here, program)))
        if schedule.edges:
            pl.when(program == schedule.splits)(lambda: write(read_edges(here)))

    if row.outputs[-1].raw_sums is None:
        read_with(row.scales)
        return
    once = jnp.float32(LOG2_E)
    same = inverse == 1
    pl.when(same)(lambda: read_with((once,)))
    pl.when(~same)(lambda: read_with((*row.scales, once)))


def read_steps(row: RowOfGroups, program: Index) -> Carries:
    """The carries after this program's share of the row's whole steps."""
    schedule = row.schedule

    def step(i: jax.Array, carries: Carries) -> Carries:
        start = row.first + i * schedule.block
        return updated(row, i, read_block(row.logits_ref, start, schedule, row.vector), carries)

    begin = program * schedule.num_steps // schedule.splits
    end = (program + 1) * schedule.num_steps // schedule.splits
    return lax.fori_loop(begin, end, step, before_any_block(row))  # type: ignore[no-any-return]


def read_edges(row: RowOfGroups) -> Carries:
    """The carries after the blocks that are in no step."""
    carries = before_any_block(row)
    for block in row.schedule.edges:
        pieces = read_fixed_edge(row.logits_ref, row.first, block, row.schedule, row.vector)
        carries = updated(row, block, pieces, carries)
    return carries


def before_any_block(row: RowOfGroups) -> Carries:
    """The carries at a program's start."""
    layout = row.schedule.layout(row.vector).reduce(1)

    def all_groups(value: float) -> jax.Array:
        return compat.cast(jnp.full((row.schedule.groups_per_block,), value, jnp.float32), layout)

    return tuple(Carry(all_groups(-jnp.inf), all_groups(0)) for _ in row.outputs)


def updated(row: RowOfGroups, block: Index, pieces: list[jax.Array], carries: Carries) -> Carries:
    """The carries after one more block, whose groups are written."""
    schedule, layout, after = row.schedule, row.schedule.layout(row.vector), []
    every = [pieces] * len(carries)
    if row.changes is not None:
        shape = pieces[0].shape
        group = compat.iota(shape, 0, layout) * schedule.group_width + block * schedule.block
        ids = group + compat.iota(shape, 1, layout)
        every[0] = changed(pieces, ids, row.changes, row.target, schedule, layout)
    for out, mine, carry in zip(row.outputs, every, carries, strict=True):
        refs = [out.sums] if out.raw_sums is None else [out.sums, out.raw_sums]
        largest, sums = maxima_and_sums(mine, row.scales[: len(refs)], layout)
        if out.exact_maxima is not None:
            _store(row, block, out.exact_maxima, largest)
            largest = rounded_down(largest, pieces[0].dtype)
        _store(row, block, out.maxima, largest)
        for i, ref in enumerate(refs):  # of one sum, all of them get it
            _store(row, block, ref, sums[min(i, len(sums) - 1)])
        maximum = jnp.maximum(carry.maximum, largest.astype(jnp.float32))
        after.append(Carry(maximum, carry.evidence + sums[0]))
    return tuple(after)


def rounded_down(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The largest numbers of a 16-bit dtype that are not above float32 x.

    Pass 2 takes groups by maxima of the logits' dtype. A logit is one: it is at most this.
    """
    nearest = x.astype(dtype)
    bits = lax.bitcast_convert_type(nearest, jnp.int16)
    below = lax.bitcast_convert_type(jnp.where(bits > 0, bits - 1, bits + 1), dtype)
    return jnp.where(nearest.astype(jnp.float32) > x, below, nearest)


def maxima_and_sums(
    pieces: list[jax.Array], scales: Scales, layout: Layout
) -> tuple[jax.Array, list[jax.Array]]:
    """The largest logit [groups] of each group of a block, in their dtype; a sum by each scale."""
    largest = jnp.max(functools.reduce(jnp.maximum, pieces), axis=1)
    reference = finite_reference(largest.astype(jnp.float32))
    reference = compat.cast(lax.broadcast_in_dim(reference, pieces[0].shape, (0,)), layout)
    # The difference is exact near the maximum, however large that is.
    differences = [piece.astype(jnp.float32) - reference for piece in pieces]
    sums = []
    for scale in scales:
        terms = [jnp.exp2(x * scale) for x in differences]
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
        sums.append(group_sums_of(terms[0], layout))
    return largest, sums


def group_sums_of(terms: jax.Array, layout: Layout) -> jax.Array:
    """The sums [groups] of terms [groups, 64]: runs of 8 in pairs, then these in pairs."""
    groups, width = terms.shape

    def body(given: Vector) -> Vector:
        mine = thread.sum_over_lanes(thread.in_pairs(thread.words(given)), width // RUN)
        return thread.one_each(mine, layout.reduce(1), (groups,))

    return thread.inline(  # type: ignore[no-any-return]
        body, (terms,), (layout,), thread.result((groups,), jnp.float32, layout.reduce(1))
    )


def _store(row: RowOfGroups, block: Index, ref: jax.Ref, values: jax.Array) -> None:
    """Write a block's values, one a group."""
    size = row.schedule.groups_per_block
    here = ref.at[pl.ds(row.groups + block * size, size)]
    compat.store(here, values)
