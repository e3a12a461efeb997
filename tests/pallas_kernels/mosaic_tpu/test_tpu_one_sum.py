"""A row's sum is one number by every TPU kernel, in every batch, over shards (interpreted)."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends import answers, read, row_totals
from pallas_kernels.backends.groups import Read
from pallas_kernels.backends.mosaic_tpu import groups_of_rows, rows
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.contract.rows import Outputs, Rows
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.sampling import Drafts, Sampling, emitted_logprobs, verify
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import oracle
from tests.support import quick_compile
from tests.support.interpreted_tpu_kernel import CUT, interpret, run_interpreted
from tests.support.shards import P, mesh_of

V, R = 1429, 9  # five groups, and 149 tokens of a sixth; three chunks
TEMPERATURES = np.resize(np.float32([1, 0.5, 2, 0.7]), R)
INTERPRETED = {"interpret": interpret(races=False), "cut": CUT}
MOST = {"log_sum_exp": True, "entropy": True, "top_logits": True}


def some_rows(vocabulary=V, dtype=np.float32):
    """Rows with ties, -inf, a NaN, one token alone, groups of -inf; a token of each."""
    rng = np.random.default_rng(vocabulary)
    x = 4 * rng.normal(size=(R, vocabulary))
    x[0, ::3], x[1, 1:], x[2, 7], x[3, 250:600] = 2.0, -np.inf, np.nan, -np.inf
    ids = rng.integers(0, vocabulary, R)
    ids[1] = 0
    return x.astype(dtype), ids.astype(np.int32)


def bits(tree):
    """The bits of a tree of arrays of 32 bits."""
    return [np.asarray(leaf).view(np.uint32).tolist() for leaf in jax.tree.leaves(tree)]


def called(x, ids, k, temperatures=TEMPERATURES, row_ids=None, num_rows=None, **wanted):
    """`topk_logprobs` by the kernel."""

    def call(x, ids, row_ids, num_rows, temperatures, interpret, cut):
        given = Rows(x, ids, row_ids, num_rows, temperatures, jnp.zeros((len(ids), 0), jnp.int32))
        return answers.topk_logprobs(partial(rows.row_sums, **how), given, Outputs(k, **wanted))

    how = INTERPRETED
    return run_interpreted(call, x, ids, row_ids, num_rows, temperatures, races=False)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_rows_and_groups_are_read_as_one_sum(dtype):
    """By the kernel of rows, and by that from which sampled rows' logprobs are made; raw ones."""
    x, _ = some_rows(dtype=dtype)
    inverse = 1 / TEMPERATURES

    def of_groups(x, inverse, interpret, cut):
        part = GroupedRows.of(x).part
        return groups_of_rows.read_groups(part, inverse, True, interpret, cut, weighted=True)

    def of_rows(x, selected, temperatures, interpret, cut):
        given = Rows(x, temperatures=temperatures)
        return rows.part_sums(
            given, None, jnp.int32(0), selected, Outputs(3, entropy=True), interpret, cut
        ).groups

    by_groups, raw = run_interpreted(of_groups, jnp.asarray(x), inverse, races=False)
    of_all = jnp.asarray(x), np.zeros(R, np.float32)
    assert bits(by_groups) == bits(run_interpreted(of_rows, *of_all, TEMPERATURES, races=False))
    once = run_interpreted(of_rows, *of_all, np.ones(R, np.float32), races=False)
    assert bits(raw) == bits(once.sums)


def test_no_batch_and_no_k_changes_a_bit():
    """Other rows, K, places and lists of rows, with and without other results."""
    x, ids = some_rows(dtype=ml_dtypes.bfloat16)
    whole = called(x, ids, 5, **MOST)
    for places, k, listed, wanted in (
        ([4], 0, False, {}),
        ([8, 0, 5], 2, True, {"entropy": True}),
        ([*range(R - 1, -1, -1), *range(R)], 5, True, MOST),
    ):
        place = np.int32(places)
        given = {"temperatures": TEMPERATURES[place], **wanted}
        if listed:
            given |= {"row_ids": place, "num_rows": np.int32(len(place))}
        out = called(x if listed else x[place], ids[place], k, **given)
        assert bits(out.logprobs) == bits(np.asarray(whole.logprobs)[place, : k + 1])
        if "entropy" in wanted:
            assert bits(out.entropy) == bits(np.asarray(whole.entropy)[place])


def on_shards(x, ids, k, shards, part_sums):
    """`topk_logprobs` of a vocabulary that devices share, by a read of a part."""
    vocabulary = x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -vocabulary % shards)))

    def call(x, ids, temperatures):
        extra = jnp.zeros((len(ids), 0), jnp.int32)
        given = Rows(x, ids, temperatures=temperatures, extra_token_ids=extra)
        shard = VocabShard("model", vocabulary)
        return answers.topk_logprobs_of_shard(part_sums, given, Outputs(k, **MOST), shard)

    specs = P(None, "model"), P(), P()
    how = {"mesh": mesh_of(shards), "in_specs": specs, "out_specs": P(), "check_vma": False}
    return quick_compile.jit(jax.shard_map(call, **how))(padded, ids, TEMPERATURES)


SPLITS = (1024, 2), (1429, 4)
MORE_SPLITS = (1429, 2), (2048, 4), (1100, 1)


@pytest.mark.parametrize(
    ("vocabulary", "shards"),
    [*SPLITS, *(pytest.param(*split, marks=pytest.mark.slow) for split in MORE_SPLITS)],
)
def test_no_shard_changes_a_bit(vocabulary, shards):
    """Whole groups, and groups that two shards have a part of; padding."""
    x, ids = some_rows(vocabulary)
    alone = called(x, ids, 5, **MOST)
    split = on_shards(x, ids, 5, shards, partial(rows.part_sums, **INTERPRETED))
    assert bits(split) == bits(alone)
    oracle.assert_matches(alone, oracle.topk_logprobs(x, ids, 5, temperatures=TEMPERATURES))


def test_sums_of_shards_as_floats_have_other_bits():
    """The negative control: each shard's sum as one group, in the order that follows the split."""

    def as_one_group(given, following, offset, selected, outputs):
        sums = rows.row_sums(given, selected, outputs, **INTERPRETED)
        number = xla.groups_of_part(given.logits.shape[1], following)
        return row_totals.as_part(sums, number)

    x, ids = some_rows(1429)
    alone = called(x, ids, 5, **MOST)
    assert bits(on_shards(x, ids, 5, 4, as_one_group)) != bits(alone)


def test_verification_and_topk_logprobs_are_one_number(monkeypatch):
    """Raw and scaled: verification gets what the kernel of groups leaves of its rows."""
    x, _ = some_rows()
    t, k = TEMPERATURES[:3], 4

    def of_groups(x, inverse, interpret, cut):
        return groups_of_rows.read_groups(GroupedRows.of(x).part, inverse, True, interpret, cut)

    by_kernel = run_interpreted(of_groups, jnp.asarray(x), np.repeat(1 / t, 3), races=False)
    arrays = jax.tree.map(np.asarray, by_kernel)

    def with_groups(job, call, by_xla, *given, **_):
        found = by_xla(*given)
        if not (isinstance(found, tuple) and isinstance(found[0], Read)):
            return found
        sums, raw = jax.tree.map(jnp.asarray, arrays)
        return (found[0]._replace(groups=sums, raw_sums=raw),)

    monkeypatch.setattr(read, "kernels_or_xla", with_groups)
    by_slot = jnp.asarray(x).reshape(3, 3, V)
    sampling = Sampling.of(3, temperature=jnp.asarray(t), seed=3)
    drafts = Drafts(jnp.full((3, 2), 9, jnp.int32), jnp.full(3, 2, jnp.int32))
    jax.clear_caches()
    # Whole here: what is known is no constant of a program that a compiler splits.
    verified = verify(by_slot, drafts, sampling, jnp.zeros(3, jnp.int32), k=k, axis_name=())
    named = np.maximum(np.asarray(verified.token_ids), 0).reshape(-1)
    there = np.asarray(verified.token_ids >= 0)
    for scaled in (None, jnp.ones(3, bool)):
        emitted = emitted_logprobs(by_slot, verified, scaled=scaled)
        temperatures = np.repeat(t, 3) if scaled is not None else None
        out = called(x, named, k, temperatures=temperatures)
        for name in ("logprobs", "token_ranks"):
            sampled = np.asarray(getattr(emitted, name))
            other = np.asarray(getattr(out, name)).reshape(sampled.shape)
            assert bits(sampled[there]) == bits(other[there])
    jax.clear_caches()
