"""The TPU kernel's read of sampled rows, interpreted, against XLA's."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends.groups import Part
from pallas_kernels.backends.mosaic_tpu import groups as sampled
from pallas_kernels.backends.xla import groups as sampled_rows
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import oracle
from tests.support import quick_compile
from tests.support.interpreted_tpu_kernel import run_interpreted

V = 1429  # five groups, and 149 tokens of a sixth; three chunks
INVERSE = np.array([1, 2, 0.5, 1], np.float32)


def found(part, inverse, raw=True):
    def call(part, inverse, interpret, cut):
        return sampled.read_groups(part, inverse, raw, interpret, cut)

    return run_interpreted(call, part, inverse)


def check(part, inverse):
    """Maxima are XLA's, sums but for rounding; NaN where a group has a NaN or +inf."""

    def by_xla(part, inverse):
        (read,) = sampled_rows.read_part(part, 0, inverse, jnp.zeros(len(inverse), jnp.int32))
        return read.groups, read.raw_sums

    expected = jax.jit(by_xla, compiler_options=quick_compile.OPTIONS)(part, inverse)
    (maxima, sums), raw = jax.tree.map(np.asarray, found(part, inverse))
    there = ~np.isnan(expected[0].sums)
    np.testing.assert_array_equal(maxima[there], np.asarray(expected[0].maxima)[there])
    np.testing.assert_allclose(sums, expected[0].sums, rtol=3e-6)
    np.testing.assert_allclose(raw, expected[1], rtol=3e-6)
    return maxima, sums, raw


@pytest.mark.parametrize(
    "dtype",
    [
        ml_dtypes.bfloat16,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (np.float32, np.float16)),
    ],
)
def test_the_kernel_reads_the_groups_that_xla_reads(dtype):
    """Two units of rows; ties, NaN, infinities, groups of -inf alone; a last group cut off."""
    x = oracle.edge_rows(V, dtype, 256)
    x = np.concatenate([x, x])[:17]
    check(GroupedRows.of(jnp.asarray(x)).part, np.resize(INVERSE, len(x)))


def test_groups_that_are_cut_by_columns():
    """A shard whose first group begins at a column of its own has the bits of one device."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 1280)) * 4).astype(np.float32)
    _, whole, raw = check(GroupedRows.of(jnp.asarray(x)).part, INVERSE[:3])
    for offset in (48, 128, 200):
        columns = np.concatenate([rng.normal(size=(3, offset)), x[:, : 1280 - offset]], axis=1)
        tail = x[:, 768:].reshape(3, 2, 256)
        shard = Part(
            *map(jnp.asarray, (columns[:, :1024].astype(np.float32), tail)), jnp.int32(offset)
        )
        _, sums, more = check(shard, INVERSE[:3])
        np.testing.assert_array_equal(sums, whole)
        np.testing.assert_array_equal(more, raw)
