"""What follows the read of sampled rows, compiled for `bench.aot`: a draw, and token ranks.

A shape's K is how many tokens are taken out of each row: 1 of certain drafts, 64 of drawn ones.
The model takes each row for one that a draft was rejected in, so that blocks are read again.
"""

from typing import Any

import jax
import numpy as np
from jax.stages import Lowered

from bench.gpu import estimates, model, sass, trips
from bench.gpu.machine_code import Code, Loop
from pallas_kernels.group_sums import number_of_groups
from pallas_kernels.mosaic_gpu import count_larger, draw, h100
from pallas_kernels.mosaic_gpu.tiling import BLOCK
from pallas_kernels.sampled_draw import RowsToDraw
from pallas_kernels.shapes import Shape

PATH = "draw"
SHAPES = (
    Shape(64, 151_936, 1, "bfloat16"),
    Shape(64, 151_936, 64, "bfloat16"),
    Shape(256, 131_072, 1, "float32"),
    Shape(64, 50_257, 1, "bfloat16"),
)
PURPOSES = (3, 1)
DRAWS = 4096  # whose blocks are counted


def lowered(shape: Shape, device: h100.H100) -> Lowered:
    """Both kernels at one shape, before they are compiled."""
    rows, groups = shape.rows, number_of_groups(shape.vocabulary)
    numbers, integers = device.array((rows,), "float32"), device.array((rows,), "int32")
    of_groups = device.array((rows, groups), "float32")
    given = RowsToDraw(
        rows=integers,
        cut_logit=numbers,
        cut_id=integers,
        taken_ids=device.array((rows, shape.k), "int32"),
        seed=device.array((rows,), "uint32"),
        position=integers,
        maxima=of_groups,
        sums=of_groups,
        largest=numbers,
        inverse=numbers,
    )

    def call(logits: jax.Array, given: RowsToDraw) -> Any:
        drawn = draw.draw(logits, given, PURPOSES)
        return drawn, count_larger.count_larger(logits, given.maxima, drawn.token_ids)

    logits = device.array((rows, shape.vocabulary), shape.dtype)
    return jax.jit(call).lower(logits, given)


def blocks_with_larger(vocabulary: int, dtype: str) -> float:
    """How many blocks hold a larger logit than a drawn token's, the mean of `DRAWS` draws.

    From a row of normally distributed logits, as `trips.selection` takes it.
    """
    rng = np.random.default_rng(0)
    x = (rng.normal(size=vocabulary) * trips.SPREAD).astype(trips.DTYPES[dtype]).astype(np.float32)
    padded = np.pad(x, (0, -vocabulary % BLOCK), constant_values=-np.inf)
    weights = np.exp(x.astype(np.float64) - x.max())
    tokens = rng.choice(vocabulary, DRAWS, p=weights / weights.sum())
    maxima = padded.reshape(-1, BLOCK).max(axis=1)
    return float((maxima[None] > x[tokens][:, None]).sum(axis=1).mean())


def estimate(
    shape: Shape, kernels: tuple[sass.Kernel, ...], chip: model.Chip
) -> estimates.Estimate:
    """The model's time of both kernels; the loop over blocks is the one that it knows in each."""
    size = np.dtype(trips.DTYPES[shape.dtype]).itemsize
    groups = 4 * number_of_groups(shape.vocabulary)
    blocks = min(shape.k, -(-shape.vocabulary // BLOCK))
    larger = blocks_with_larger(shape.vocabulary, shape.dtype)
    turns = float(blocks), larger
    read = (2 * groups + (blocks * BLOCK + 256) * size, groups + larger * BLOCK * size)
    times = [
        model.time(
            model.Launched(
                kernel.code, kernel.registers, shape.rows, shape.rows * (more + 64), of_blocks(n)
            ),
            chip,
        )
        for kernel, n, more in zip(kernels, turns, read, strict=True)
    ]
    return estimates.Estimate(times[0], times[1], 2 * chip.launch)


def of_blocks(turns: float) -> model.Trips:
    """Every loop of these kernels is one over blocks."""

    def trips_of(_: Code, __: Loop) -> float:
        return turns

    return trips_of
