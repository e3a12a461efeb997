"""The floor: a kernel that reads the same rows in the same pieces and only takes their maximum.

No kernel that reads the logits once can be faster at the same split, so the distance to the floor
is the cost of the sums, the counts and the selection.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.reading import read_block, read_edge
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule


def row_maxima(schedule: Schedule, logits: jax.Array, interpret: Any = None) -> jax.Array:
    """The maximum of each row of logits [R, V], as [R] float32.

    A compiled kernel gives NaN for a row with a NaN; an interpreted one may not.
    """
    kernel = GPU.kernel(
        functools.partial(_kernel, schedule=schedule, interpreted=interpret is not None),
        out_type=[compat.shape((logits.shape[0] * schedule.programs,), jnp.float32)],
        grid=(schedule.programs, logits.shape[0]),
        grid_names=("program", "row"),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="row_maxima",
        interpret=interpret,
    )
    (partial,) = kernel(logits.reshape(-1))
    return jnp.max(partial.reshape(logits.shape[0], schedule.programs), axis=1)


def _kernel(
    logits_ref: Any,  # [R * V]  in
    maxima_ref: Any,  # [R * programs] f32  out
    *,
    schedule: Schedule,
    interpreted: bool,
) -> None:
    row, program = lax.axis_index("row"), lax.axis_index("program")
    first = row * schedule.vocabulary
    skew = schedule.skew(row)

    def nothing(vector: int) -> jax.Array:
        lowest = jnp.full((schedule.groups_per_block,), -jnp.inf, jnp.float32)
        return compat.cast(lowest, schedule.layout(vector).reduce(1))

    def larger(maximum: jax.Array, pieces: list[jax.Array]) -> jax.Array:
        group_maxima = jnp.max(functools.reduce(jnp.maximum, pieces), axis=1)
        return jnp.maximum(maximum, group_maxima.astype(jnp.float32))

    def finish(maximum: jax.Array) -> None:
        maxima_ref[row * schedule.programs + program] = jnp.max(maximum)

    def read_steps() -> None:
        def step(i: jax.Array, maximum: jax.Array) -> jax.Array:
            for b in range(schedule.blocks_per_step):
                block = schedule.first_block + i * schedule.blocks_per_step + b
                start = first - skew + block * schedule.block
                pieces = read_block(logits_ref, start, schedule, schedule.vector, interpreted)
                maximum = larger(maximum, pieces)
            return maximum

        begin = program * schedule.num_steps // schedule.splits
        end = (program + 1) * schedule.num_steps // schedule.splits
        finish(lax.fori_loop(begin, end, step, nothing(schedule.vector)))

    def read_edges() -> None:
        vector = schedule.vector if schedule.aligned else 1
        maximum = nothing(vector)
        for block in schedule.edges:
            pieces = read_edge(logits_ref, first, skew, block, schedule, vector, interpreted)
            maximum = larger(maximum, pieces)
        finish(maximum)

    if schedule.splits:
        pl.when(program < schedule.splits)(read_steps)
    if schedule.edges:
        pl.when(program == schedule.splits)(read_edges)
