"""The floor: a kernel that reads the same rows in the same pieces and only takes their maximum.

No kernel that reads the logits once can be faster at the same split, so the distance to it is what
the sums, the counts and the selection cost.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.compat import GPU
from pallas_kernels.mosaic_rows import as_words, read_block
from pallas_kernels.mosaic_tiling import GROUPS_PER_BLOCK, Tiling


def row_maxima(tiling: Tiling, logits: jax.Array, interpret: Any = None) -> jax.Array:
    """logits [R, V] -> [R] float32; NaN where a row has one, at least when compiled."""
    kernel = GPU.kernel(
        functools.partial(_kernel, tiling=tiling, interpreted=interpret is not None),
        out_type=[
            compat.shape((logits.shape[0], tiling.splits, GROUPS_PER_BLOCK), jnp.float32),
        ],
        grid=(logits.shape[0], tiling.splits),
        grid_names=("row", "split"),
        compiler_params=compat.compiler_params(),
        kernel_name="row_maxima",
        interpret=interpret,
    )
    (partial,) = kernel(as_words(tiling, logits))
    return jnp.max(partial, axis=(1, 2))


def _kernel(
    words_ref: Any,  # [R * V / logits_per_word]  in: the logits
    maxima_ref: Any,  # [R, splits, 16] f32  out
    *,
    tiling: Tiling,
    interpreted: bool,
) -> None:
    row, split = lax.axis_index("row"), lax.axis_index("split")
    first_word = row * (tiling.vocabulary // tiling.logits_per_word)

    def largest(start: Any, maximum: jax.Array) -> jax.Array:
        pieces = read_block(words_ref, first_word, start, None, tiling, interpreted)
        return jnp.maximum(maximum, jnp.max(functools.reduce(jnp.maximum, pieces), axis=1))

    def step(i: jax.Array, maximum: jax.Array) -> jax.Array:
        for b in range(tiling.blocks_per_step):
            maximum = largest((i * tiling.blocks_per_step + b) * tiling.block, maximum)
        return maximum

    lowest = jnp.full((GROUPS_PER_BLOCK,), -jnp.inf, jnp.float32)
    lowest = compat.cast(lowest, tiling.layout.reduce(1))
    begin = split * tiling.num_steps // tiling.splits
    end = (split + 1) * tiling.num_steps // tiling.splits
    maximum = lax.fori_loop(begin, end, step, lowest)
    compat.store(maxima_ref.at[row, split], maximum, interpreted)
    if not tiling.tail:
        return

    @pl.when(split == tiling.splits - 1)
    def _() -> None:
        last = maximum
        for start, _new in tiling.tail:  # a maximum may take a logit twice
            last = largest(start, last)
        compat.store(maxima_ref.at[row, split], last, interpreted)
