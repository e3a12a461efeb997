"""The TPU kernel's read of sampled rows and of shards, interpreted, against XLA's; a wrong one."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends import read
from pallas_kernels.backends.groups import Needed, RowPart
from pallas_kernels.backends.mosaic_tpu import groups as sampled
from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.backends.mosaic_tpu import unit
from pallas_kernels.backends.xla import groups as sampled_rows
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.linear import read_columns
from pallas_kernels.linear.schedule import LinearSchedule
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import oracle
from tests.support import kernel_calls, linear_cases, quick_compile
from tests.support.interpreted_tpu_kernel import CUT, interpret, run_interpreted, run_watched
from tests.support.shards import P, mesh_of, padded
from tests.support.watched_interpreters import watched

V = 1429  # five groups, and 149 tokens of a sixth; three chunks
INVERSE = np.array([1, 2, 0.5, 1], np.float32)


def check(part, inverse):
    """Maxima are XLA's, sums up to rounding; NaN where a group has a NaN or +inf."""

    def by_xla(part, inverse):
        (read,) = sampled_rows.read_part(
            part, 0, inverse, Needed.all_of(jnp.zeros(len(inverse), jnp.int32))
        )
        return read.groups, read.raw_sums

    def call(part, inverse, interpret, cut):
        return sampled.read_groups(part, inverse, True, interpret, cut)

    expected = quick_compile.jit(by_xla)(part, inverse)
    (maxima, sums, _), raw = jax.tree.map(np.asarray, run_interpreted(call, part, inverse))
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
        _, sums, more = check(RowPart(columns, jnp.asarray(tail), jnp.int32(offset)), INVERSE[:3])
        np.testing.assert_array_equal(sums, whole)
        np.testing.assert_array_equal(more, raw)


COLUMNS, SHARDS, WIDTH = 1173, 2, 588  # the last shard ends in padding
WAYS = (LinearSchedule(3, WIDTH, WIDTH, 3), LinearSchedule(10, 128, 64, 5, elsewhere=500))


@pytest.mark.parametrize("way", WAYS, ids=["rows", "columns"])
def test_shards_of_logits_that_are_there(way, monkeypatch):
    """What a TPU's programs of `linear_topk_logprobs` read: shards of -inf alone, of ties, with a
    NaN; parts that begin early; tokens of other shards."""

    def by_kernel(job, call, by_xla, *rows, backends, **_):
        assert (job, backends) == ("rows", ("mosaic_tpu",))
        how = {"interpret": interpret(), "cut": CUT}
        return call(SimpleNamespace(row_sums=partial(run.row_sums, **how)), *rows)

    def on_tpu(*given, like, cpu, default):
        return default(*given)

    monkeypatch.setattr(read, "kernels_or_xla", by_kernel)
    monkeypatch.setattr(read_columns, "lowered_for", on_tpu)
    rng = np.random.default_rng(3)
    x = np.concatenate([oracle.edge_rows(COLUMNS, np.float32, 128), rng.normal(0, 4, (3, COLUMNS))])
    x[-1, WIDTH:] = -np.inf
    x = x.astype(np.float32).astype(np.float64)
    hidden, head = linear_cases.factors(x)
    ids = rng.integers(0, COLUMNS, 10).astype(np.int32)
    given = {"temperatures": rng.choice(np.float32([0, 0.5, 1, 2]), 10)}
    given["extra_token_ids"] = rng.integers(-1, COLUMNS + 1, (10, 2)).astype(np.int32)

    def on_shards(call):
        specs = P(), P("model"), *[P()] * 6
        split = {"mesh": mesh_of(SHARDS), "in_specs": specs, "out_specs": P(), "check_vma": False}
        return quick_compile.jit(jax.shard_map(call, **split))

    with watched() as raced:
        found = linear_cases.run(
            way, hidden, padded(head.T, SHARDS).T, ids, 2, shard=VocabShard("model", COLUMNS),
            compiler=on_shards, entropy=True, **given,
        )  # fmt: skip
    assert not raced()
    oracle.assert_matches(found, oracle.topk_logprobs(x, ids, 2, **given))


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
