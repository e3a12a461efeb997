"""What follows the read of sampled rows, compiled for `bench.aot`: a draw, and token ranks.

A shape's K is how many tokens are taken out of each row: 1 of certain drafts, 64 of drawn ones.
The model takes each row for one in which a draft was rejected, so that groups are read again.
"""

from typing import Any

import jax
import numpy as np
from jax.stages import Lowered

from bench.gpu import estimates, model, sass, trips
from pallas_kernels.backends.groups import WIDTH, RowsToDraw, number_of_groups
from pallas_kernels.backends.mosaic_gpu import count_larger, draw
from pallas_kernels.backends.mosaic_gpu.schedule import BLOCK
from pallas_kernels.testing import compile_target
from pallas_kernels.testing.shapes import Shape

PATH = "draw"
SHAPES = (
    Shape(64, 151_936, 1, "bfloat16"),
    Shape(64, 151_936, 64, "bfloat16"),
    Shape(256, 131_072, 1, "float32"),
    Shape(64, 50_257, 1, "bfloat16"),
)
PURPOSES = (3, 1)
AT_ONCE = BLOCK // WIDTH  # groups that a turn reads
DRAWS = 4096  # whose groups are counted


def lowered(shape: Shape, device: compile_target.CompileTarget) -> Lowered:
    """Both kernels at one shape, before they are compiled."""
    rows, groups = shape.rows, number_of_groups(shape.vocabulary)
    numbers, integers = device.array((rows,), "float32"), device.array((rows,), "int32")
    of_groups = device.array((rows, groups), "float32")
    excluded, seeds = device.array((rows, shape.k), "int32"), device.array((rows,), "uint32")
    of_slots = integers, numbers, integers, excluded, seeds, integers
    given = RowsToDraw(*of_slots, of_groups, of_groups, numbers, numbers)

    def call(logits: jax.Array, given: RowsToDraw) -> Any:
        drawn = draw.draw(logits, given, PURPOSES)
        return drawn, count_larger.count_larger(logits, given.maxima, drawn.token_ids)

    logits = device.array((rows, shape.vocabulary), shape.dtype)
    return jax.jit(call).lower(logits, given)


def groups_with_larger(vocabulary: int, dtype: str) -> tuple[float, float]:
    """How many groups hold a larger logit than a drawn token's; in how many turns they are read.

    Means of `DRAWS` draws from a row of normally distributed logits, as `trips.selection` takes it.
    """
    rng = np.random.default_rng(0)
    x = (rng.normal(size=vocabulary) * trips.SPREAD).astype(trips.DTYPES[dtype]).astype(np.float32)
    padded = np.pad(x, (0, -vocabulary % WIDTH), constant_values=-np.inf)
    weights = np.exp(x.astype(np.float64) - x.max())
    tokens = rng.choice(vocabulary, DRAWS, p=weights / weights.sum())
    maxima = padded.reshape(-1, WIDTH).max(axis=1)
    found = (maxima[None] > x[tokens][:, None]).sum(axis=1)
    return float(found.mean()), float(np.ceil(found / AT_ONCE).mean())


def estimate(
    shape: Shape, kernels: tuple[sass.Kernel, ...], chip: model.Chip
) -> estimates.Estimate:
    """The model's time of both kernels; the one loop in each is over the groups read again."""
    size = np.dtype(trips.DTYPES[shape.dtype]).itemsize
    groups = 4 * number_of_groups(shape.vocabulary)
    larger, turns = groups_with_larger(shape.vocabulary, shape.dtype)
    again = (shape.k, larger)
    read = (2 * groups + WIDTH * size, groups)
    times = [
        model.time(
            model.Launched(
                kernel.code,
                kernel.registers,
                shape.rows,
                shape.rows * (more + number * WIDTH * size + 64),
                of_groups(each),
            ),
            chip,
        )
        for kernel, number, more, each in zip(
            kernels, again, read, (-(-shape.k // AT_ONCE), turns), strict=True
        )
    ]
    return estimates.Estimate(times[0], times[1], 2 * chip.launch)


def of_groups(turns: float) -> model.Trips:
    """Every loop of these kernels is one over groups."""
    return lambda *_: turns
