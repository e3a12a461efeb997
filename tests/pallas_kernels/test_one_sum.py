"""A row's logprobs have the same bits by every call, in every batch, on every mesh (XLA)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import greedy, topk_logprobs
from pallas_kernels.backends import row_totals
from pallas_kernels.backends.xla import group_sums
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.sampling import (
    Drafts,
    Sampling,
    emitted_logprobs,
    kept_logprobs,
    verify,
)
from pallas_kernels.sampling.kept_set import KEPT_ALL, KEPT_MANY, PaddedKept
from tests.support import quick_compile

B, S, K = 3, 2, 5
R = B * S


def some_rows(vocabulary, dtype=jnp.float32):
    """Rows [R, V], a token of each, temperatures; among them ties, -inf, a NaN, one token alone."""
    rng = np.random.default_rng(vocabulary)
    x = 3 * rng.normal(size=(R, vocabulary))
    x[0, ::3], x[1, 1:], x[2, 7] = 2.0, -np.inf, np.nan
    ids = rng.integers(0, vocabulary, R)
    ids[1] = 0
    t = np.asarray([1, 0.5, 1, 2, 0, 0.7], np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(ids, jnp.int32), jnp.asarray(t)


def bits(x):
    """The bits of a tree of arrays of 32 bits."""
    return [np.asarray(leaf).view(np.uint32).tolist() for leaf in jax.tree.leaves(x)]


OPTIONS = {"entropy": True, "log_sum_exp": True, "top_logits": True}
# V that shards hold in whole groups, in groups that two share, and in less than one; odd, padded.
VOCABULARIES = (2048, 2056, 4040, 1000, 264)


def on_mesh(x, ids, t, rows, shards):
    """`topk_logprobs` of logits whose rows and vocabulary are split so."""
    mesh = Mesh(np.array(jax.devices()[: rows * shards]).reshape(rows, shards), ("r", "v"))
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("r", "v")))
    return topk_logprobs(split, ids, K, temperatures=t, **OPTIONS)


@pytest.mark.parametrize("vocabulary", [
    VOCABULARIES[-1], *(pytest.param(size, marks=pytest.mark.long) for size in VOCABULARIES[:-1]),
])  # fmt: skip
def test_no_mesh_changes_a_bit_of_a_row(vocabulary):
    x, ids, t = some_rows(vocabulary)
    alone = bits(topk_logprobs(x, ids, K, temperatures=t, **OPTIONS))
    for rows, shards in ((1, 2), (1, 4), (1, 8), (2, 4), (2, 1)):
        assert bits(on_mesh(x, ids, t, rows, shards)) == alone, (rows, shards)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_no_mesh_changes_a_bit_of_a_row_of_16_bits(dtype):
    x, ids, t = some_rows(1000, dtype)
    alone = bits(topk_logprobs(x, ids, K, temperatures=t, **OPTIONS))
    assert bits(on_mesh(x, ids, t, 1, 4)) == alone


def test_changed_rows_keep_their_bits_on_a_mesh():
    """What follows a shard's columns is changed as they are."""
    x, ids, t = some_rows(1000)
    places = jnp.asarray(np.random.default_rng(0).integers(0, 1000, (R, 200)), jnp.int32)
    changes = {
        "allowed": jnp.asarray(np.random.default_rng(1).integers(0, 2**32, (R, 32)), jnp.uint32),
        "bias_token_ids": places,
        "bias": jnp.ones((R, 200), jnp.float32) / 3,
        "row_ids": jnp.asarray([4, 5, 3, 3, 0, 1], jnp.int32),
        "num_rows": jnp.int32(5),
        "temperatures": t,
    }
    alone = bits(topk_logprobs(x, ids, K, **changes))
    for shards in (2, 4):
        mesh = Mesh(np.array(jax.devices()[:shards]), ("v",))
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "v")))
        assert bits(topk_logprobs(split, ids, K, **changes)) == alone


def test_verification_and_topk_logprobs_are_one_number():
    x, _, t = some_rows(2056)
    by_slot, slots = x.reshape(B, S, -1), t[:B]
    sampling = Sampling.of(B, temperature=slots, seed=3)
    drafts = Drafts(jnp.full((B, S - 1), 9, jnp.int32), jnp.full(B, S - 1, jnp.int32))
    verified = verify(by_slot, drafts, sampling, jnp.zeros(B, jnp.int32), k=K)
    named = jnp.maximum(verified.token_ids, 0).reshape(-1)
    there = np.asarray(verified.token_ids >= 0)
    for scaled in (None, jnp.ones(B, bool)):
        emitted = emitted_logprobs(by_slot, verified, scaled=scaled)
        temperatures = None if scaled is None else jnp.repeat(slots, S)
        rows = topk_logprobs(x, named, K, temperatures=temperatures)
        for name in ("logprobs", "token_ranks"):
            mine = np.asarray(getattr(emitted, name))
            other = np.asarray(getattr(rows, name)).reshape(mine.shape)
            np.testing.assert_array_equal(mine[there], other[there])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_subnormal_logits_keep_their_order_beside_sampled_rows(dtype):
    x = np.zeros((3, 1000), np.float32)
    x[0, 5], x[0, 997], x[1], x[1, 500] = 1e-40, 3e-40, -5e-40, -1e-40
    rows, sampling = jnp.asarray(x, dtype), Sampling.of(3, temperature=[0, 0, 1], top_k=1)
    ids = jnp.array([6, 2, 2], jnp.int32)

    @quick_compile.as_users
    def verified(x):
        alone, read = (
            verify(x[:, None], Drafts.none(3, 0, 1000), sampling, jnp.zeros(3, jnp.int32), k=k)
            for k in (None, 2)
        )
        emitted = emitted_logprobs(x[:, None], read, token_ids=ids[:, None])
        return alone.token_ids[:2, 0], read.token_ids[:2, 0], emitted.token_ranks[:, 0]

    greedy_ids, same_ids, ranks = verified(rows)
    assert greedy_ids.tolist() == same_ids.tolist() == [997, 500]
    assert ranks.tolist() == topk_logprobs(rows, ids, 2).token_ranks.tolist() == [3, 2, 1]


def test_no_transformation_or_call_changes_a_bit_of_a_row():
    x, ids, t = some_rows(1000)
    call = functools.partial(topk_logprobs, k=K, temperatures=t)
    wanted = bits(call(x, ids))

    def loss(x):
        out = call(x, ids)
        return jnp.where(jnp.isnan(out.logprobs), 0, out.logprobs).sum(), out

    def step(_, row):
        return None, topk_logprobs(row[0][None], row[1][None], K, temperatures=row[2][None])

    assert bits(jax.jit(call)(x, ids)) == wanted
    (_, out), _ = jax.value_and_grad(loss, has_aux=True)(x)
    assert bits(out) == wanted
    scanned = jax.lax.scan(step, None, (x, ids, t))[1]
    assert bits(jax.tree.map(lambda y: y[:, 0], scanned)) == wanted
    single = jax.vmap(lambda x, i, t: topk_logprobs(x[None], i[None], K, temperatures=t[None]))
    assert bits(jax.tree.map(lambda y: y[:, 0], single(x, ids, t))) == wanted


def test_a_greedy_choice_has_the_bits_of_two_reads():
    """By one read of a verification, raw and scaled; of a row that is invalid too."""
    x, _, t = some_rows(1000)
    drafts, sampling = Drafts.none(R, 0, 1000), Sampling.of(R, temperature=t)
    verified = verify(x[:, None], drafts, sampling, jnp.zeros(R, jnp.int32), k=K, all_greedy=True)
    chosen = greedy(x).token_ids
    for scaled in (None, jnp.ones(R, bool)):
        emitted = emitted_logprobs(x[:, None], verified, scaled=scaled)
        temperatures = None if scaled is None else t
        rows = topk_logprobs(x, chosen, K, temperatures=temperatures)
        assert bits(jax.tree.map(lambda y: y[:, 0], emitted)) == bits(rows)


def test_a_row_that_keeps_all_has_the_scaled_logprob():
    x, ids, t = some_rows(1000)
    nothing_cut = PaddedKept(
        jnp.full((R, 1), -1, jnp.int32), jnp.full(R, KEPT_ALL, jnp.int32), jnp.zeros(R)
    )
    scaled = topk_logprobs(x, ids, 0, temperatures=t).logprobs[:, 0]
    assert bits(kept_logprobs(x, ids, nothing_cut, t)) == bits(scaled)


@pytest.mark.long
def test_nothing_changes_a_bit_of_a_kept_logprob():
    """Sets of ids and marks, by every call, in every batch and on every mesh."""
    x, _, t = some_rows(4040)
    rng = np.random.default_rng(0)
    sets = np.sort(rng.permuted(np.tile(np.arange(4040), (R, 1)), axis=1)[:, :301])
    sets = sets.astype(np.int32)
    sets[1, 0] = 0
    counts = jnp.asarray([301, 300, 7, KEPT_MANY, KEPT_ALL, KEPT_ALL], jnp.int32)
    kept = PaddedKept(jnp.asarray(sets), counts, jnp.asarray([0, 0, 0, -0.3, 0, 0], jnp.float32))
    ids = kept.token_ids[:, 0]
    alone = bits(kept_logprobs(x, ids, kept, t))
    assert bits(jax.jit(kept_logprobs)(x, ids, kept, t)) == alone

    def loss(x):
        logprobs = kept_logprobs(x, ids, kept, t)
        return jnp.nansum(logprobs), logprobs

    (_, logprobs), _ = jax.value_and_grad(loss, has_aux=True)(x)
    assert bits(logprobs) == alone

    def of_row(row):
        return kept_logprobs(*jax.tree.map(lambda y: y[None], row))[0]

    assert bits(jax.vmap(of_row)((x, ids, kept, t))) == alone
    assert bits(jax.lax.map(of_row, (x, ids, kept, t))) == alone
    for rows, shards in ((1, 4), (2, 4), (2, 1)):
        mesh = Mesh(np.array(jax.devices()[: rows * shards]).reshape(rows, shards), ("r", "v"))
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("r", "v")))
        assert bits(kept_logprobs(split, ids, kept, t)) == alone, (rows, shards)


def test_groups_in_another_order_have_another_float_sum():
    """The negative control: weights of groups, added up as floats and as integers."""
    x = jnp.asarray(np.random.default_rng(5).normal(size=(64, 4096)), jnp.float32)
    tail, once = jnp.zeros((64, 0, 256)), jnp.ones(64, jnp.float32)
    groups = group_sums.of_block(x, tail, once)
    backward = jax.tree.map(lambda y: y[:, ::-1], groups)

    def float_sums(groups):
        gap = row_totals.scaled(groups.maxima, x.max(axis=1, keepdims=True), jnp.float32(1))
        weights = np.asarray(groups.sums * exponential(gap))
        return functools.reduce(np.add, weights.T)

    def exact(groups):
        return row_totals.row_mass(groups, x.max(axis=1), once, 4096)

    assert (float_sums(groups) != float_sums(backward)).any()
    assert bits(exact(groups)) == bits(exact(backward))
