"""Pass 1 on a GPU: one read of each target row yields its partial results and its groups' maxima.

A program (a warpgroup) reads some steps of one row, or its edges. For each of a block's rows of
groups it keeps the running maximum, and for each register a sum of exponentials relative to it and
a count of logits larger than the given token's. At its end it reduces them to a number each, which
pass 2 combines: no program waits for another one.

A step's loads all start before the first of them is used: 128 bytes a thread are in flight.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.backends.mosaic_gpu import compat, reading, thread
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.schedule import Index, Layout, Schedule
from pallas_kernels.backends.mosaic_gpu.thread import load_at_once
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.numbers.ordered_keys import is_counted

# An exponent of 2 whose power is 0 in float32: -inf times 0 would be NaN.
LEAST = -200.0


class Carry(NamedTuple):
    """What a program keeps between steps, all float32."""

    maximum: jax.Array  # [groups of a block], running
    total: jax.Array  # a piece: sums of exponentials
    counts: jax.Array | None  # a piece, if logits are counted
    weighted: jax.Array | None  # a piece, for the entropy: sums of exponentials by exponents


def read_rows(
    schedule: Schedule,
    logits: jax.Array,
    num_targets: int,
    chosen: jax.Array | None,
    targets: reading.Targets,
    with_groups: bool,
    outputs: Outputs,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Partial results and group maxima of R target rows; those of skipped rows are not initialized.

    Args:
      schedule: the cut of the rows.
      logits: [N, V].
      num_targets: R.
      chosen: [R] int32, the given tokens, clipped to the vocabulary here; or [R] float32, their
        logits; or None, and nothing is counted.
      targets: which rows.
      with_groups: whether the kernel stores the group maxima.
      outputs: of the call; here it matters whether entropies are among them, and inclusive ranks.
      allowed: [R * `reading.words_of`] int32 bit mask words of the target rows, or None. A
        forbidden token's logit is read as -inf; not so that of a given token.

    Returns:
      partial results, float32 [parts, R, programs] without its axes: maxima, sums of
      exponentials, counts, and for the entropy sums by exponents of 2;
      group maxima [R * padded_groups] in the logits' dtype, of which `num_groups` a row are
      written, or None. Counts are not initialized where nothing is counted.
    """
    kernel = GPU.kernel(
        functools.partial(
            read_rows_kernel,
            schedule=schedule,
            num_logits_rows=logits.shape[0],
            num_targets=num_targets,
            # What matters here alone: the kernel is the same for every K.
            outputs=Outputs(0, entropy=outputs.entropy, inclusive=outputs.inclusive),
        ),
        out_type=result_types(schedule, num_targets, logits.dtype, with_groups, outputs),
        grid=(schedule.programs, num_targets),  # the last axis may exceed 65535, no other may
        grid_names=("program", "row"),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="read_rows",
    )
    out = kernel(logits.reshape(-1), chosen, targets, allowed)
    return out[0], out[1] if with_groups else None


def result_types(
    schedule: Schedule, num_targets: int, dtype: DTypeLike, with_groups: bool, outputs: Outputs
) -> list[jax.ShapeDtypeStruct]:
    """The types of what `read_rows` returns."""
    partials = partials_size(schedule, num_targets, outputs.entropy)
    groups = num_targets * schedule.padded_groups
    types = [compat.shape((partials,), jnp.float32), compat.shape((groups,), dtype)]
    return types if with_groups else types[:1]


def partials_size(schedule: Schedule, num_targets: int, entropy: bool) -> int:
    """The length of the partial results."""
    return (4 if entropy else 3) * num_targets * schedule.programs


class RowToRead(NamedTuple):
    """What a program knows of the row that it reads, in the kernel."""

    schedule: Schedule
    logits_ref: jax.Ref  # [N * V]
    groups_ref: jax.Ref | None  # [R * padded_groups], or None: group maxima are not stored
    target: Index  # which target row
    first: Index  # where the row of logits starts
    skew: Index  # `Schedule.skew`
    scale: jax.Array  # of exponents, `exponents_scale`
    selected: jax.Array | None  # the logit by which others are counted; None: nothing is counted
    mask: reading.RowMask | None
    outputs: Outputs


def read_rows_kernel(
    logits_ref: jax.Ref,  # [N * V]  in
    chosen_ref: jax.Ref | None,  # [R]  in: i32 token ids, or f32 logits, or None
    targets: reading.Targets,  # in
    allowed_ref: jax.Ref | None,  # [R * words] i32  in, or None
    partials_ref: jax.Ref,  # [parts * R * programs] f32  out
    groups_ref: jax.Ref | None = None,  # [R * padded_groups]  out: group maxima
    *,
    schedule: Schedule,
    num_logits_rows: int,
    num_targets: int,
    outputs: Outputs,
) -> None:
    target = lax.axis_index("row")
    program = lax.axis_index("program")
    # What needs no other number is loaded first, so that it all comes from memory at once.
    logits_row, number = targets.row(target)
    temperature = targets.temperature(target)
    chosen = None if chosen_ref is None else load_at_once(chosen_ref, target)

    @pl.when(reading.is_active(target, logits_row, number, num_logits_rows))
    def _() -> None:
        first = logits_row * schedule.vocabulary
        row = RowToRead(
            schedule,
            logits_ref,
            groups_ref,
            target,
            first,
            schedule.skew(logits_row),
            reading.exponents_scale(temperature),
            reading.selected_logit(schedule, logits_ref, first, chosen),
            reading.mask_of_row(allowed_ref, target, schedule),
            outputs,
        )

        def write(carry: Carry) -> None:
            for i, result in reduced(carry, row.scale):
                partials_ref[(i * num_targets + target) * schedule.programs + program] = result

        if schedule.splits:
            pl.when(program < schedule.splits)(lambda: write(read_steps(row, program)))
        if schedule.edges:
            pl.when(program == schedule.splits)(lambda: write(read_edges(row)))


def read_steps(row: RowToRead, program: Index) -> Carry:
    """The carry after this program's share of the row's whole steps."""
    schedule = row.schedule
    layout = schedule.layout(schedule.vector)

    def step(i: jax.Array, carry: Carry) -> Carry:
        block = schedule.first_block + i
        start = row.first - row.skew + block * schedule.block
        pieces = reading.read_block(row.logits_ref, start, schedule, schedule.vector)
        pieces = reading.masked(pieces, row.mask, start - row.first, schedule, schedule.vector)
        return updated(row, block, pieces, carry, layout)

    begin = program * schedule.num_steps // schedule.splits
    end = (program + 1) * schedule.num_steps // schedule.splits
    return lax.fori_loop(begin, end, step, before_any_block(row, schedule.vector))  # type: ignore[no-any-return]


def read_edges(row: RowToRead) -> Carry:
    """The carry after the blocks that are in no step."""
    schedule = row.schedule
    vector = schedule.vector if schedule.aligned else 1
    layout = schedule.layout(vector)
    carry = before_any_block(row, vector)
    for block in schedule.edges:
        pieces = reading.read_edge(row.logits_ref, row.first, row.skew, block, schedule, vector)
        first_id = schedule.block_ids(block, row.skew)[0]
        pieces = reading.masked(pieces, row.mask, first_id, schedule, vector)
        carry = updated(row, block, pieces, carry, layout)
    return carry


def before_any_block(row: RowToRead, vector: int) -> Carry:
    """The carry at a program's start: maxima of -inf, sums and counts of 0."""
    layout = row.schedule.layout(vector)
    zeros = compat.cast(jnp.zeros(row.schedule.piece(vector), jnp.float32), layout)
    lowest = jnp.full((row.schedule.groups_per_block,), -jnp.inf, jnp.float32)
    maximum = compat.cast(lowest, layout.reduce(1))
    count = None if row.selected is None else zeros
    return Carry(maximum, zeros, count, zeros if row.outputs.entropy else None)


def updated(
    row: RowToRead, block: Index, pieces: list[jax.Array], carry: Carry, layout: Layout
) -> Carry:
    """The carry after one more block; its group maxima are stored if the call has `groups_ref`."""
    maximum, total, count, weighted = carry
    group_maxima = jnp.max(functools.reduce(jnp.maximum, pieces), axis=1)
    store_group_maxima(row, block, group_maxima)
    new_maximum = jnp.maximum(maximum, group_maxima.astype(jnp.float32))
    reference = finite_reference(new_maximum)
    moved = (maximum - reference) * row.scale
    rescale = jnp.exp2(moved)
    reference = _spread(reference, total.shape, layout)
    terms, by_exponent, selected = [], [], None
    if row.selected is not None:
        selected = thread.again(row.selected)
    for piece in pieces:
        x = piece.astype(jnp.float32)
        # The difference first: it is exact near the maximum, however large that is.
        exponent = (x - reference) * row.scale
        terms.append(jnp.exp2(exponent))
        if weighted is not None:
            by_exponent.append(terms[-1] * jnp.maximum(exponent, jnp.float32(LEAST)))
        if count is not None and selected is not None:
            counts = is_counted(x, selected, row.outputs.inclusive)
            count += jnp.where(counts, jnp.float32(1), jnp.float32(0))
    # A sum of few terms is added to the many: its rounding errors stay small.
    rescale = _spread(rescale, total.shape, layout)
    if weighted is not None:
        moved = _spread(jnp.maximum(moved, jnp.float32(LEAST)), total.shape, layout)
        weighted = (weighted + moved * total) * rescale + functools.reduce(jnp.add, by_exponent)
    total = total * rescale + functools.reduce(jnp.add, terms)
    return Carry(new_maximum, total, count, weighted)


def store_group_maxima(row: RowToRead, block: Index, group_maxima: jax.Array) -> None:
    """Write a block's group maxima to their places among the row's."""
    if row.groups_ref is None:
        return
    schedule = row.schedule
    begin = row.target * schedule.padded_groups + block * schedule.groups_per_block
    here = row.groups_ref.at[pl.ds(begin, schedule.groups_per_block)]
    compat.store(here, group_maxima)


def finite_reference(maximum: jax.Array) -> jax.Array:
    """The maximum, or 0 for -inf: any finite reference gives sums of 0, where -inf gives NaN."""
    return jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)


def reduced(carry: Carry, scale: jax.Array) -> list[tuple[int, jax.Array]]:
    """A program's results, each with the number of its part."""
    maximum, total, count, weighted = carry
    largest = jnp.max(maximum)
    reference = finite_reference(largest)
    of_groups = jnp.sum(total, axis=1)
    moved = (maximum - reference) * scale
    rescale = jnp.exp2(moved)
    sums = of_groups * rescale
    # Without a finite logit the sum is 0, and the factor may be infinite.
    nothing = maximum == -jnp.inf
    sums = jnp.where(nothing, jnp.float32(0), sums)
    results = [(0, largest), (1, jnp.sum(sums))]
    if count is not None:
        results.append((2, jnp.sum(jnp.sum(count, axis=1))))
    if weighted is not None:
        moved = jnp.maximum(moved, jnp.float32(LEAST))
        by_exponent = (jnp.sum(weighted, axis=1) + moved * of_groups) * rescale
        results.append((3, jnp.sum(jnp.where(nothing, jnp.float32(0), by_exponent))))
    return results


def _spread(per_group: jax.Array, shape: tuple[int, ...], layout: Layout) -> jax.Array:
    """[groups] -> [groups, width]."""
    return compat.cast(lax.broadcast_in_dim(per_group, shape, (0,)), layout)
