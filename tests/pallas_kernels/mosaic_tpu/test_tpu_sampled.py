"""The TPU kernel's read of sampled rows and of shards, interpreted, against XLA's; a wrong one."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends.groups import Part
from pallas_kernels.backends.mosaic_tpu import groups as sampled
from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.backends.mosaic_tpu import unit
from pallas_kernels.backends.xla import groups as sampled_rows
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import oracle
from tests.support import kernel_calls, quick_compile
from tests.support.interpreted_tpu_kernel import run_interpreted, run_watched

V = 1429  # five groups, and 149 tokens of a sixth; three chunks
INVERSE = np.array([1, 2, 0.5, 1], np.float32)


def check(part, inverse):
    """Maxima are XLA's, sums but for rounding; NaN where a group has a NaN or +inf."""

    def by_xla(part, inverse):
        (read,) = sampled_rows.read_part(part, 0, inverse, jnp.zeros(len(inverse), jnp.int32))
        return read.groups, read.raw_sums

    def call(part, inverse, interpret, cut):
        return sampled.read_groups(part, inverse, True, interpret, cut)

    expected = quick_compile.jit(by_xla)(part, inverse)
    (maxima, sums), raw = jax.tree.map(np.asarray, run_interpreted(call, part, inverse))
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
        columns = jnp.asarray(columns[:, :1024], jnp.float32)
        _, sums, more = check(Part(columns, jnp.asarray(tail), jnp.int32(offset)), INVERSE[:3])
        np.testing.assert_array_equal(sums, whole)
        np.testing.assert_array_equal(more, raw)


COLUMNS, SHARDS, K = 1173, 3, 2
WIDTH = COLUMNS // SHARDS


def test_the_kernels_parts_are_those_of_xla():
    """Shards of -inf alone, of ties, with a NaN; tokens of other shards are counted by."""
    more = np.random.default_rng(3).normal(size=(3, COLUMNS)) * 4
    x = np.concatenate([oracle.edge_rows(COLUMNS, np.float32, 128), more.astype(np.float32)])
    x[-1, WIDTH:] = -np.inf
    selected = np.tile(x[np.arange(len(x)), np.arange(len(x)) * 80 % COLUMNS], SHARDS)
    rest = (None, None, np.tile(np.geomspace(0.3, 3, len(x)).astype(np.float32), SHARDS))
    # One kernel for all of them: shards as more rows.
    parts = np.concatenate([x[:, i * WIDTH : (i + 1) * WIDTH] for i in range(SHARDS)])

    def call(parts, selected, rest, interpret, cut):
        how = {"interpret": interpret, "cut": cut}
        return kernel_calls.row_sums(run, parts, selected, Outputs(K), *rest, **how)

    found = run_interpreted(call, parts, selected, rest)
    expected = kernel_calls.row_sums(xla, jnp.asarray(parts), selected, Outputs(K), *rest)
    # Of rows without a NaN, all but the sums' rounding; of the others, that they have one.
    rows = ~np.isnan(parts).any(1)
    for name in ("maximum", "num_larger", "top_logits"):
        a, b = (np.asarray(getattr(one, name))[rows] for one in (found, expected))
        np.testing.assert_array_equal(a, b)
    finite = (np.asarray(expected.top_logits) > -np.inf) & rows[:, None]
    np.testing.assert_array_equal(found.top_ids[finite], expected.top_ids[finite])
    np.testing.assert_allclose(found.sum_exp[rows], expected.sum_exp[rows], rtol=3e-6)
    np.testing.assert_array_equal(np.isnan(found.sum_exp), np.isnan(expected.sum_exp))


X = np.random.default_rng(5).normal(size=(9, 700)).astype(np.float32)
IDS = np.arange(9, dtype=np.int32)


def of_rows(run_it=run_interpreted):
    def call(x, ids, interpret, cut):
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        rest = (None, None, None, nothing, None, interpret, cut)
        return kernel_calls.topk_logprobs(run, x, ids, Outputs(1), *rest)

    return run_it(call, X, IDS)


def test_a_wait_left_out(monkeypatch):
    """What was never copied is read; where it is copied at once, a race is found."""
    wait = unit.Copies.wait

    def all_but_one(self, number, index, tokens):
        if tokens != 700 - 512:  # the last chunk's
            wait(self, number, index, tokens)

    monkeypatch.setattr(unit.Copies, "wait", all_but_one)
    with pytest.raises(AssertionError):
        oracle.assert_matches(of_rows(), oracle.topk_logprobs(X, IDS, 1))
    assert of_rows(run_it=partial(run_watched, copied="eager"))[1]
