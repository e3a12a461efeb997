"""Pass 1 on a GPU: one read of each target row yields its statistics and its groups' maxima.

A program (a warpgroup) reads one split of one row. For each of a block's 16 rows of groups it keeps
the running maximum, and for each register a sum of exponentials relative to it and a count of
logits larger than the given token's. Partial results go out as they are, [R, splits, 16]:
`mosaic_gpu.finish_statistics` combines them, so no program waits for another one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.compat import GPU
from pallas_kernels.mosaic_tiling import GROUPS_PER_BLOCK, Tiling

LOG2_E = 1.4426950408889634

# Running maximum [16], sums and counts [16, load_width], all float32.
Carry = tuple[jax.Array, jax.Array, jax.Array]
# Index of the first group, first id, and first id that is new or None if all are: each block's.
Blocks = list[tuple[Any, Any, int | None]]


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
      maxima, sums of exponentials, counts of larger logits: [R, splits, 16] float32 each;
      the given tokens' logits [R] float32; group maxima [R, padded_groups] float32, of which
      `num_groups` are written.
    """
    num_logits_rows = logits.shape[0]
    num_targets = token_ids.shape[0]
    shape = (num_targets, tiling.splits, GROUPS_PER_BLOCK)
    partial = compat.shape(shape, jnp.float32)
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
            compat.shape((num_targets, tiling.padded_groups), jnp.float32),
        ],
        grid=(num_targets, tiling.splits),
        grid_names=("row", "split"),
        compiler_params=compat.compiler_params(),
        kernel_name="read_rows",
        interpret=interpret,
    )
    flat = logits.reshape(-1)
    maxima, sums, counts, selected, groups = kernel(
        flat, as_words(tiling, logits), token_ids, row_ids, num_rows, scales
    )
    return maxima, sums, counts, selected, groups


def as_words(tiling: Tiling, logits: jax.Array) -> jax.Array:
    """logits [N, V] as a flat array of words; no copy on a GPU."""
    if tiling.paired:
        return lax.bitcast_convert_type(logits.reshape(-1, 2), jnp.uint32)
    return logits.reshape(-1)


def _read_rows_kernel(
    logits_ref: Any,  # [N * V]  in
    words_ref: Any,  # [N * V / logits_per_word]  in: the same memory
    token_ids_ref: Any,  # [R] i32  in
    row_ids_ref: Any,  # [R] i32  in
    num_rows_ref: Any,  # [1] i32  in
    scales_ref: Any,  # [R] f32  in: log2(e) / temperature
    maxima_ref: Any,  # [R, splits, 16] f32  out
    sums_ref: Any,  # [R, splits, 16] f32  out
    counts_ref: Any,  # [R, splits, 16] f32  out
    selected_ref: Any,  # [R] f32  out: the given tokens' logits
    groups_ref: Any,  # [R, padded_groups] f32  out: group maxima
    *,
    tiling: Tiling,
    num_logits_rows: int,
    interpreted: bool,
) -> None:
    target = lax.axis_index("row")
    split = lax.axis_index("split")
    row = row_ids_ref[target]
    wanted = (target < num_rows_ref[0]) & (row >= 0) & (row < num_logits_rows)

    @pl.when(wanted)
    def _() -> None:
        first_word = row * (tiling.vocabulary // tiling.logits_per_word)
        token = jnp.clip(token_ids_ref[target], 0, tiling.vocabulary - 1)
        selected = logits_ref[row * tiling.vocabulary + token].astype(jnp.float32)
        scale = scales_ref[target]

        @pl.when(split == 0)
        def _() -> None:
            selected_ref[target] = selected

        def read_blocks(blocks: Blocks, carry: Carry) -> Carry:
            maximum, total, count = carry
            values = []
            for first_group, start, first_new in blocks:
                block = read_block(words_ref, first_word, start, first_new, tiling, interpreted)
                group_maxima = jnp.max(functools.reduce(jnp.maximum, block), axis=1)
                compat.store(
                    groups_ref.at[target, pl.ds(first_group, GROUPS_PER_BLOCK)],
                    group_maxima,
                    interpreted,
                )
                values.append((group_maxima, block))
            new_maximum = functools.reduce(jnp.maximum, [m for m, _ in values], maximum)
            # All -inf so far: any finite reference gives sums of 0, where -inf would give NaN.
            reference = jnp.where(new_maximum == -jnp.inf, jnp.float32(0), new_maximum)
            rescale = jnp.exp2((maximum - reference) * scale)
            total = total * _spread(rescale, tiling)
            reference = _spread(reference, tiling)
            for _, block in values:
                for x in block:
                    # The difference first: it is exact near the maximum, however large that is.
                    total += jnp.exp2((x - reference) * scale)
                    count += jnp.where(x > selected, jnp.float32(1), jnp.float32(0))
            return new_maximum, total, count

        def step(i: jax.Array, carry: Carry) -> Carry:
            blocks = [i * tiling.blocks_per_step + b for b in range(tiling.blocks_per_step)]
            return read_blocks(
                [(b * GROUPS_PER_BLOCK, b * tiling.block, None) for b in blocks], carry
            )

        def finish(carry: Carry) -> None:
            maximum, total, count = carry
            compat.store(maxima_ref.at[target, split], maximum, interpreted)
            compat.store(sums_ref.at[target, split], jnp.sum(total, axis=1), interpreted)
            compat.store(counts_ref.at[target, split], jnp.sum(count, axis=1), interpreted)

        zeros = jnp.zeros((GROUPS_PER_BLOCK, tiling.load_width), jnp.float32)
        zeros = compat.cast(zeros, tiling.layout)
        lowest = jnp.full((GROUPS_PER_BLOCK,), -jnp.inf, jnp.float32)
        lowest = compat.cast(lowest, tiling.layout.reduce(1))
        begin = split * tiling.num_steps // tiling.splits
        end = (split + 1) * tiling.num_steps // tiling.splits
        carry = lax.fori_loop(begin, end, step, (lowest, zeros, zeros))

        if not tiling.tail:
            finish(carry)
            return

        @pl.when(split < tiling.splits - 1)
        def _() -> None:
            finish(carry)

        @pl.when(split == tiling.splits - 1)
        def _() -> None:
            first_group = tiling.num_steps * tiling.blocks_per_step * GROUPS_PER_BLOCK
            blocks = [
                (first_group + i * GROUPS_PER_BLOCK, start, None if start == new else new)
                for i, (start, new) in enumerate(tiling.tail)
            ]
            finish(read_blocks(blocks, carry))


def read_block(
    words_ref: Any,
    first_word: jax.Array,
    start: Any,
    first_new: int | None,
    tiling: Tiling,
    interpreted: bool,
) -> list[jax.Array]:
    """Pieces [16, load_width] float32 of the block at `start`; logits before first_new are -inf."""
    words = tiling.group_width // tiling.logits_per_word
    pieces = compat.load_block(
        words_ref,
        first_word + start // tiling.logits_per_word,
        (GROUPS_PER_BLOCK, words),
        tiling.load_width,
        tiling.layout,
        interpreted,
    )
    out = []
    for i, piece in enumerate(pieces):
        if tiling.paired:  # one instruction a logit, where unpacking a bfloat16 takes two
            low = lax.bitcast_convert_type(piece << 16, jnp.float32)
            high = lax.bitcast_convert_type(piece & jnp.uint32(0xFFFF0000), jnp.float32)
            halves = [low, high]
        else:
            halves = [piece.astype(jnp.float32)]
        if first_new is not None:
            ids = _word_ids(i * tiling.load_width, words, tiling) * tiling.logits_per_word + start
            halves = [jnp.where(ids + h >= first_new, x, -jnp.inf) for h, x in enumerate(halves)]
        out += halves
    return out


def _word_ids(first: int, words_per_group: int, tiling: Tiling) -> jax.Array:
    """[16, load_width] int32: the index in its block of each word of a piece."""
    shape = (GROUPS_PER_BLOCK, tiling.load_width)
    group = compat.iota(shape, 0, tiling.layout)
    column = compat.iota(shape, 1, tiling.layout)
    return group * words_per_group + column + first


def _spread(per_group: jax.Array, tiling: Tiling) -> jax.Array:
    """[16] -> [16, load_width]."""
    shape = (GROUPS_PER_BLOCK, tiling.load_width)
    return compat.cast(lax.broadcast_in_dim(per_group, shape, (0,)), tiling.layout)
