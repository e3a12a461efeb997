"""Pass 1 on a GPU: one read of each target row yields its statistics and its groups' maxima.

A program (a warpgroup) reads some steps of one row, or its edges. For each of a block's rows of
groups it keeps the running maximum, and for each register a sum of exponentials relative to it and
a count of logits larger than the given token's. At its end it reduces them to a number each, which
`mosaic_gpu.read_rows` combines: no program waits for another one.

A step's loads all start before the first of them is used: 128 bytes a thread are in flight.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.compat import GPU
from pallas_kernels.mosaic_tiling import Tiling

LOG2_E = 1.4426950408889634

# Running maximum [groups of a block], sums and counts (each a piece), all float32.
Carry = tuple[jax.Array, jax.Array, jax.Array]


def read_rows(
    tiling: Tiling,
    logits: jax.Array,
    token_ids: jax.Array,
    row_ids: jax.Array,
    num_rows: jax.Array,
    scales: jax.Array,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Statistics and group maxima of R target rows; those of skipped rows are not initialized.

    Args:
      tiling: the cut of the rows.
      logits: [N, V].
      token_ids: [R] int32; clipped to the vocabulary here.
      row_ids: [R] int32, a row of logits each; outside [0, N) the target row is skipped.
      num_rows: [1] int32; target rows from there on are skipped.
      scales: [R] float32, log2(e) / temperature.
      interpret: None to compile, or `compat.interpret_params(...)`.

    Returns:
      maxima, sums of exponentials, counts of larger logits: [R, programs] float32 each;
      the given tokens' logits [R] float32; group maxima [R, padded_groups] in the logits' dtype, of
      which `num_groups` are written.
    """
    num_logits_rows = logits.shape[0]
    num_targets = token_ids.shape[0]
    partial = compat.shape((num_targets * tiling.programs,), jnp.float32)
    kernel = GPU.kernel(
        functools.partial(
            _read_rows_kernel,
            tiling=tiling,
            num_logits_rows=num_logits_rows,
            interpreted=interpret is not None,
        ),
        out_type=[
            partial,
            partial,
            partial,
            compat.shape((num_targets,), jnp.float32),
            compat.shape((num_targets, tiling.padded_groups), logits.dtype),
        ],
        grid=(tiling.programs, num_targets),  # the last axis may exceed 65535, no other may
        grid_names=("program", "row"),
        compiler_params=compat.compiler_params(),
        kernel_name="read_rows",
        interpret=interpret,
    )
    *parts, selected, groups = kernel(logits.reshape(-1), token_ids, row_ids, num_rows, scales)
    maxima, sums, counts = (part.reshape(num_targets, tiling.programs) for part in parts)
    return maxima, sums, counts, selected, groups


def _read_rows_kernel(
    logits_ref: Any,  # [N * V]  in
    token_ids_ref: Any,  # [R] i32  in
    row_ids_ref: Any,  # [R] i32  in
    num_rows_ref: Any,  # [1] i32  in
    scales_ref: Any,  # [R] f32  in: log2(e) / temperature
    maxima_ref: Any,  # [R * programs] f32  out
    sums_ref: Any,  # [R * programs] f32  out
    counts_ref: Any,  # [R * programs] f32  out
    selected_ref: Any,  # [R] f32  out: the given tokens' logits
    groups_ref: Any,  # [R, padded_groups]  out: group maxima
    *,
    tiling: Tiling,
    num_logits_rows: int,
    interpreted: bool,
) -> None:
    target = lax.axis_index("row")
    program = lax.axis_index("program")
    row = row_ids_ref[target]
    wanted = (target < num_rows_ref[0]) & (row >= 0) & (row < num_logits_rows)

    @pl.when(wanted)
    def _() -> None:
        first = row * tiling.vocabulary
        skew = tiling.skew(row)
        token = jnp.clip(token_ids_ref[target], 0, tiling.vocabulary - 1)
        selected = logits_ref[first + token].astype(jnp.float32)
        scale = scales_ref[target]

        @pl.when(program == 0)
        def _() -> None:
            selected_ref[target] = selected

        def update(blocks: list[tuple[Any, list[jax.Array]]], carry: Carry, layout: Any) -> Carry:
            """The carry after more blocks, given by index and pieces."""
            maximum, total, count = carry
            new_maximum = maximum
            for block, pieces in blocks:
                group_maxima = jnp.max(functools.reduce(jnp.maximum, pieces), axis=1)
                here = pl.ds(block * tiling.groups_per_block, tiling.groups_per_block)
                compat.store(groups_ref.at[target, here], group_maxima, interpreted)
                new_maximum = jnp.maximum(new_maximum, group_maxima.astype(jnp.float32))
            # All -inf so far: any finite reference gives sums of 0, where -inf would give NaN.
            reference = jnp.where(new_maximum == -jnp.inf, jnp.float32(0), new_maximum)
            rescale = jnp.exp2((maximum - reference) * scale)
            reference = _spread(reference, total.shape, layout)
            terms = []
            for _, pieces in blocks:
                for piece in pieces:
                    x = piece.astype(jnp.float32)
                    # The difference first: it is exact near the maximum, however large that is.
                    terms.append(jnp.exp2((x - reference) * scale))
                    count += jnp.where(x > selected, jnp.float32(1), jnp.float32(0))
            # A sum of few terms is added to the many: its rounding errors stay small.
            rescale = _spread(rescale, total.shape, layout)
            total = total * rescale + functools.reduce(jnp.add, terms)
            return new_maximum, total, count

        def finish(carry: Carry) -> None:
            maximum, total, count = carry
            largest = jnp.max(maximum)
            reference = jnp.where(largest == -jnp.inf, jnp.float32(0), largest)
            sums = jnp.sum(total, axis=1) * jnp.exp2((maximum - reference) * scale)
            # Without a finite logit the sum is 0, and the factor may be infinite.
            sums = jnp.where(maximum == -jnp.inf, jnp.float32(0), sums)
            part = target * tiling.programs + program
            maxima_ref[part] = largest
            sums_ref[part] = jnp.sum(sums)
            counts_ref[part] = jnp.sum(jnp.sum(count, axis=1))

        def read_steps() -> None:
            layout = tiling.layout(tiling.vector)

            def step(i: jax.Array, carry: Carry) -> Carry:
                begin = tiling.first_block + i * tiling.blocks_per_step
                blocks = [begin + b for b in range(tiling.blocks_per_step)]
                loaded = []
                for block in blocks:
                    start = first - skew + block * tiling.block
                    loaded.append(read_block(logits_ref, start, tiling, tiling.vector, interpreted))
                return update(list(zip(blocks, loaded, strict=True)), carry, layout)

            begin = program * tiling.num_steps // tiling.splits
            end = (program + 1) * tiling.num_steps // tiling.splits
            finish(lax.fori_loop(begin, end, step, _nothing(tiling, tiling.vector)))

        def read_edges() -> None:
            vector = tiling.vector if tiling.aligned else 1
            layout = tiling.layout(vector)
            carry = _nothing(tiling, vector)
            for block in tiling.edges:
                pieces = read_edge(logits_ref, first, skew, block, tiling, vector, interpreted)
                carry = update([(block, pieces)], carry, layout)
            finish(carry)

        if tiling.splits:
            pl.when(program < tiling.splits)(read_steps)
        if tiling.edges:
            pl.when(program == tiling.splits)(read_edges)


def read_block(
    logits_ref: Any, start: Any, tiling: Tiling, vector: int, interpreted: bool
) -> list[jax.Array]:
    """Pieces (`tiling.piece(vector)`) of the block at `start`, which is a multiple of `vector`."""
    return compat.load_block(
        logits_ref,
        start,
        (tiling.groups_per_block, tiling.group_width),
        tiling.piece(vector)[1],
        tiling.layout(vector),
        interpreted,
    )


def read_edge(
    logits_ref: Any,  # [N * V]
    first: Any,
    skew: Any,
    block: int,
    tiling: Tiling,
    vector: int,
    interpreted: bool,
) -> list[jax.Array]:
    """The same of an edge of the row that starts at `first`; what is not the block's is -inf."""
    start, begin, end = tiling.block_ids(block, skew)
    pieces = read_block(logits_ref, first + start, tiling, vector, interpreted)
    if tiling.aligned and (block + 1) * tiling.block <= tiling.vocabulary:
        return pieces  # whole, only in no step
    shape, layout = pieces[0].shape, tiling.layout(vector)
    group = compat.iota(shape, 0, layout) * tiling.group_width + start
    column = compat.iota(shape, 1, layout)
    out = []
    for i, piece in enumerate(pieces):
        ids = group + (column + i * shape[1])
        inside = (ids >= begin) & (ids < end)
        out.append(jnp.where(inside, piece, jnp.asarray(-jnp.inf, piece.dtype)))
    return out


def _nothing(tiling: Tiling, vector: int) -> Carry:
    """Of no block."""
    layout = tiling.layout(vector)
    zeros = compat.cast(jnp.zeros(tiling.piece(vector), jnp.float32), layout)
    lowest = jnp.full((tiling.groups_per_block,), -jnp.inf, jnp.float32)
    return compat.cast(lowest, layout.reduce(1)), zeros, zeros


def _spread(per_group: jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """[groups] -> [groups, width]."""
    return compat.cast(lax.broadcast_in_dim(per_group, shape, (0,)), layout)
