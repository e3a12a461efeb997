"""The GPU kernels' read of sampled rows, interpreted, against XLA's and the float64 oracle.

The compiled kernels are executed by `.ci/heavy ptx`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends.groups import Part, Read
from pallas_kernels.backends.mosaic_gpu import groups as sampled
from pallas_kernels.backends.mosaic_gpu import pass1_groups
from pallas_kernels.backends.mosaic_gpu.tiling import Tiling, choose_fixed_tiling
from pallas_kernels.backends.xla import groups as sampled_rows
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import oracle
from tests.support import quick_compile
from tests.support.interpreted_kernels import run_without_races

# Rows that start at vectors or between two; whole blocks, ragged ones, a last group cut off.
CASES = {
    "bfloat16": Tiling(8448, "bfloat16", 256, 1, 2, fixed=True),
    "float32": Tiling(4100, "float32", 256, 1, 1, fixed=True),
}


def rows_of(tiling):
    return oracle.edge_rows(tiling.vocabulary, tiling.dtype, tiling.group_width)


def by_xla(part, inverse, needed, k):
    def call(part, inverse, needed):
        return sampled_rows.read(part, inverse, needed, k)

    return jax.jit(call, compiler_options=quick_compile.OPTIONS)(part, inverse, needed)


def assert_same(found, expected, x):
    """Sums but for rounding, all else equal; of invalid rows what `Read` promises."""
    sums = np.asarray(expected.groups.sums)
    there = ~np.isnan(sums)
    np.testing.assert_array_equal(
        np.asarray(found.groups.maxima)[there], np.asarray(expected.groups.maxima)[there]
    )
    np.testing.assert_allclose(found.groups.sums, sums, rtol=3e-6)
    np.testing.assert_allclose(found.raw_sums, expected.raw_sums, rtol=3e-6)
    valid = [row for row in range(len(x)) if oracle.is_valid(x[row].astype(np.float64))]
    for name in ("top_ids", "top_logits"):
        mine, other = (np.asarray(getattr(read, name)) for read in (found, expected))
        np.testing.assert_array_equal(mine[valid], other[valid])


@pytest.mark.fast
def test_the_kernels_read_what_xla_reads():
    """Groups' maxima and sums, and as many candidates as the row needs that needs most."""
    tiling = Tiling(4099, "bfloat16", 256, 1, 1, fixed=True)
    x = rows_of(tiling)
    inverse = np.resize(np.array([1, 2, 0.5, 1], np.float32), len(x))
    needed = np.zeros(len(x), np.int32)
    needed[-1] = 10
    part = GroupedRows.of(jnp.asarray(x)).part

    def call(part, inverse, needed, interpret):
        return sampled.read(part, inverse, needed, -1, tiling, interpret)

    found = run_without_races(call, part, inverse, needed)
    assert_same(found, by_xla(part, inverse, needed, -1), x)


@pytest.mark.parametrize("name", CASES)
def test_sums_at_temperature_1_too_and_candidates(name):
    tiling = CASES[name]
    x = rows_of(tiling)
    inverse = np.resize(np.array([1, 2, 0.5, 1], np.float32), len(x))

    def call(x, inverse, interpret):
        out = pass1_groups.read_groups(tiling, x, inverse, True, interpret=interpret)
        groups = sampled.of_rows(out, tiling, -(-tiling.vocabulary // 256))
        return Read(*groups, *sampled.top_of_groups(x, tiling, out, 3, interpret))

    found = run_without_races(call, jnp.asarray(x), inverse)
    part, needed = GroupedRows.of(jnp.asarray(x)).part, np.zeros(len(x), np.int32)
    expected = by_xla(part, inverse, needed, 3)
    top = {name: getattr(expected, name)[:, :3] for name in ("top_ids", "top_logits")}
    assert_same(found, expected._replace(**top), x)


def test_groups_that_are_cut_by_columns():
    """A shard whose first group begins at column 48, and whose tail has two groups."""
    x = rows_of(Tiling(4400, "float32", 256, 1, 1))[:3]
    tail = np.stack([x[:, :512] * 0.5, x[:, 600:1112]], axis=1)[:, :, :256]
    part = Part(jnp.asarray(x), jnp.asarray(tail), jnp.int32(48))
    inverse, needed = np.array([1, 2, 0.5], np.float32), np.zeros(3, np.int32)

    def call(part, inverse, needed, interpret):
        return sampled.read(part, inverse, needed, -1, None, interpret)

    found = run_without_races(call, part, inverse, needed)
    assert_same(found, by_xla(part, inverse, needed, -1), x)


def sums_of(x, inverse):
    """The sums [R, G] of one read."""
    tiling = choose_fixed_tiling(len(x), x.shape[1], x.dtype.name)

    def call(x, inverse, interpret):
        out = pass1_groups.read_groups(tiling, x, inverse, False, interpret=interpret)
        return sampled.of_rows(out, tiling, -(-x.shape[1] // 256))[0].sums

    return np.asarray(run_without_races(call, x, inverse))


def test_a_forgotten_token_would_be_seen(monkeypatch):
    """Negative control: the last lane's last logit is left out of each sum."""
    x = rows_of(Tiling(4096, "float32", 256, 1, 1))[:1]
    inverse = np.ones(1, np.float32)
    right = pass1_groups.group_sums_of
    expected = np.exp(x.reshape(16, 256) - x.reshape(16, 256).max(1, keepdims=True)).sum(1)
    np.testing.assert_allclose(sums_of(x, inverse)[0], expected, rtol=3e-6)
    monkeypatch.setattr(
        pass1_groups, "group_sums_of", lambda terms, *rest: right(terms.at[:, -1].set(0), *rest)
    )
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(sums_of(x, inverse)[0], expected, rtol=3e-6)
