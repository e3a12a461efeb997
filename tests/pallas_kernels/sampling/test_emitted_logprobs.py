"""One read for verification and logprobs: the same tokens, and the values of `topk_logprobs`."""

import functools

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling import Drafts, Sampling, logprobs_of_read, verify
from tests.support import programs, quick_compile
from tests.support.shards import mesh_of

B, S, V = 8, 3, 1003
NAN, INF = np.nan, np.inf
TEMPERATURES = np.float32([0, 1, 0.5, 2, 1, 0.8, 0.3, 0])


def arguments(temperatures):
    """Rows with ties, masked tokens, few finite ones, and invalid ones of each kind."""
    rng = np.random.default_rng(3)
    x = np.round(rng.normal(0, 2, (B, S, V)), 1).astype(np.float32)
    x[1, 0, 7], x[2, 1, 900], x[3, 0, :] = NAN, INF, -INF
    x[4, 0, 2:] = -INF  # fewer than K are finite
    x[5, :, 100:400] = -INF
    x[0, 2, 5] = NAN
    drafts = np.where(np.isnan(x), -INF, x).argmax(axis=2).astype(np.int32)[:, :-1]
    drafts[::3, 1] += 1
    top_p = np.resize([1, 1, 0.9], B)
    sampling = Sampling.of(B, temperature=temperatures, top_p=top_p, seed=np.arange(B))
    return x, Drafts(drafts, np.full(B, S - 1, np.int32)), sampling


SCALED = np.arange(B) % 2 == 0
EXTRA = np.int32([[slot, V - 1, V + 3 * (slot % 2)] for slot in range(B)])


@functools.cache
def program(k, shards):
    """(tokens of a verification without `k`, with it, logprobs raw, and by slot scaled)."""
    where = {"axis_name": ()}
    if shards > 1:
        where = {"mesh": mesh_of(shards), "axis_name": "model", "vocab_size": V}

    @quick_compile.jit
    def call(x, drafts, sampling):
        if shards > 1:  # anything may stand in the padding
            x = jnp.pad(x, ((0, 0), (0, 0), (0, -V % shards)), constant_values=9)
        positions = jnp.arange(B, dtype=jnp.int32)
        plain = verify(x, drafts, sampling, positions, **where) if k == 5 else None
        found = verify(x, drafts, sampling, positions, k=k, **where)
        ids = found.token_ids
        raw = logprobs_of_read(x, ids, found.read, **where)
        named = {"scaled": jnp.asarray(SCALED), "extra_token_ids": jnp.asarray(EXTRA)}
        mixed = logprobs_of_read(x, ids, found.read, **named, **where)
        return plain and plain[:2], found[:2], raw, mixed

    return call


@pytest.mark.parametrize("temperatures", [TEMPERATURES, np.zeros(B, np.float32)])
@pytest.mark.parametrize(("k", "shards"), [
    (5, 1), pytest.param(300, 2, marks=pytest.mark.chips),
    pytest.param(0, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_one_read_gives_the_tokens_and_the_logprobs(k, shards, temperatures):
    x, drafts, sampling = arguments(temperatures)
    plain, found, raw, mixed = program(k, shards)(x, drafts, sampling)
    if plain:
        chex.assert_trees_all_equal(found, plain)
    ids = np.asarray(found[0]).reshape(-1)
    warm = np.where((temperatures > 0) & SCALED, temperatures, np.float32(1))
    each = {"temperatures": np.repeat(warm, S), "extra_token_ids": np.repeat(EXTRA, S, axis=0)}
    there = ids >= 0
    for ours, options in ((raw, {}), (mixed, each)):
        theirs = programs.topk_logprobs(x.reshape(B * S, V), ids, k, **options)
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.token_ranks[there], theirs.token_ranks[there])
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=3e-7, atol=5e-6)
        np.testing.assert_allclose(ours.extra_logprobs, theirs.extra_logprobs, rtol=3e-7, atol=5e-6)
    assert np.isnan(np.asarray(raw.logprobs)[:, 0]).any()
    assert len({*np.asarray(raw.token_ranks)[there].tolist()}) > (2 if temperatures.any() else 1)
