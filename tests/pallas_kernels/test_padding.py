"""Columns of padding: nothing in them is read, whatever the row holds, on one device and on two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels import VocabShard, greedy, topk_logprobs
from pallas_kernels.sampling import (
    Drafts,
    Sampling,
    draw,
    emitted_logprobs,
    kept_sets,
    logprobs_of_read,
    truncation,
    verify,
)
from tests.support import quick_compile

V = 3
NAN, INF = np.nan, np.inf
ROWS = np.array(
    [[NAN, NAN, NAN], [NAN, 1, 2], [1, 2, NAN], [-INF, -INF, -INF], [1, INF, 2], [0, 2, 1]],
    np.float32,
)
N = len(ROWS)
IDS = np.array([0, 3, 4, 5, 3, 1], np.int32)  # most are outside of the vocabulary
EXTRA = np.tile(np.array([3, 4, 0, -1], np.int32), (N, 1))
SLOTS = Sampling.of(N, temperature=0.7, top_k=2, seed=3)
POSITIONS = jnp.zeros(N, jnp.int32)
NO_DRAFTS = Drafts(jnp.zeros((N, 0), jnp.int32), POSITIONS)


def of_logits(x, **how):
    """What functions with a `vocab_size` give."""
    by_slot, ids, extra = x[:, None], jnp.asarray(IDS), {"extra_token_ids": jnp.asarray(EXTRA)}
    options = extra | {"entropy": True, "log_sum_exp": True}
    verified = verify(by_slot, NO_DRAFTS, SLOTS, POSITIONS, k=2, **how)
    chosen = verify(by_slot, NO_DRAFTS, SLOTS, POSITIONS, k=2, all_greedy=True, **how)

    return {
        "greedy": greedy(x, **how),
        "of the choice": topk_logprobs(x, greedy(x, **how).token_ids, 2, **options, **how),
        "topk_logprobs": topk_logprobs(x, ids, 2, **options, **how),
        "inclusive": topk_logprobs(x, ids, 2, rank_ties="inclusive", **how),
        "verify, k": (verified.token_ids, verified.num_tokens, verified.cut),
        "verify": verify(by_slot, NO_DRAFTS, SLOTS, POSITIONS, **how),
        "verify, all greedy": emitted_logprobs(by_slot, chosen, **how),
        "verify, flat": verify(x, NO_DRAFTS, SLOTS, POSITIONS, row_ids=row_ids(), **how),
        "emitted_logprobs": logprobs_of_read(by_slot, ids[:, None], verified.read, **extra, **how),
        "draw": draw(by_slot, SLOTS, POSITIONS, **how),
    }


def of_columns(x, shard):
    """What functions of a device's columns give."""
    cut = truncation(x, SLOTS, shard=shard)
    kept = kept_sets(x, jnp.arange(N, dtype=jnp.int32), N, cut, shard=shard)
    return {"truncation": cut, "kept_sets": kept}


def row_ids():
    return jnp.arange(N, dtype=jnp.int32)[:, None]


@pytest.fixture(scope="module")
def expected():
    """The same of logits without padding."""
    return quick_compile.jit(lambda x: of_logits(x) | of_columns(x, VocabShard()))(ROWS)


def padded(columns, value):
    return np.concatenate([ROWS, np.full((N, columns - V), value, np.float32)], axis=1)


def assert_same(results, expected):
    for name, values in results.items():
        pairs = zip(jax.tree.leaves(values), jax.tree.leaves(expected[name]), strict=True)
        for value, right in pairs:
            np.testing.assert_allclose(value, right, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("value", [0.0, 9.0, NAN, INF])
def test_padding_on_one_device_is_not_read(value, expected):
    np.testing.assert_array_equal(expected["greedy"].token_ids, [0, 2, 1, 0, 1, 1])  # by hand
    assert_same(one_device(padded(5, value)), expected)
    assert_same({"greedy": greedy(padded(5, value), vocab_size=V)}, expected)


@quick_compile.jit
def one_device(x):
    return of_logits(x, vocab_size=V) | of_columns(x, VocabShard(None, V))


@pytest.mark.chips
@pytest.mark.parametrize("value", [9.0, NAN])
def test_padding_on_a_mesh_is_not_read(value, expected):
    mesh = Mesh(np.array(jax.devices()[:2]), ("v",))
    how = {"vocab_size": V, "axis_name": "v"}
    x = padded(4, value)
    assert_same(quick_compile.jit(lambda x: of_logits(x, mesh=mesh, **how))(x), expected)
    mapped = jax.shard_map(
        lambda x: of_logits(x, **how) | of_columns(x, VocabShard("v", V)),
        mesh=mesh, in_specs=jax.P(None, "v"), out_specs=jax.P(),
    )  # fmt: skip
    assert_same(quick_compile.jit(mapped)(x), expected)
