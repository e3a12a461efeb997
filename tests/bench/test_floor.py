"""The benchmark's floor, a kernel that takes each row's maximum and does nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.gpu import floor
from pallas_kernels.backends.mosaic_gpu import compat
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule, choose_schedule
from tests.support.interpreted_kernels import run_without_races


@pytest.mark.parametrize("vocabulary", [4352, 8195])  # with and without skews
def test_it_reads_the_rows_of_the_kernels(vocabulary):
    """In steps, and at the rows' edges."""
    schedule = Schedule(vocabulary, "bfloat16", 128, 1, 1)
    x = np.random.default_rng(1).normal(size=(3, vocabulary)).astype(jnp.bfloat16)
    x[0, 4097], x[1, -1], x[2, 0] = 9, 9, 9

    def call(x, interpret):
        return floor.row_maxima(schedule, x, interpret)

    maxima = run_without_races(call, x)
    np.testing.assert_array_equal(maxima, x.astype(np.float32).max(axis=1))


@pytest.mark.parametrize(("rows", "vocabulary", "k"), [(64, 151_936, 20), (70_000, 2048, 1)])
def test_it_lowers_for_cuda(monkeypatch, rows, vocabulary, k):
    """A grid's y and z end at 65535; its x, the last axis in Pallas, at 2**31 - 1."""
    grids = []

    def recorded(body, *, grid, **options):
        grids.append(grid)
        return kernel(body, grid=grid, **options)

    kernel = compat.GPU.kernel
    monkeypatch.setattr(compat.GPU, "kernel", recorded)
    schedule = choose_schedule(rows, vocabulary, k, "bfloat16")
    traced = jax.jit(lambda x: floor.row_maxima(schedule, x)).trace(
        jax.ShapeDtypeStruct((rows, vocabulary), jnp.bfloat16)
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    [(programs, last)] = grids
    assert programs <= 65_535
    assert last == rows
