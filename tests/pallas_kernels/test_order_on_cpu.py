"""The order of a few hundred numbers a row, by integers."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.backends.xla import selection
from pallas_kernels.lowering.forms import canonical, ordered_keys
from tests.support import quick_compile

ROWS, N, K = 3, 200, 128


def random_rows(rng):
    return rng.normal(size=(ROWS, N)) * 4


def rows_with_missing_ones(rng):
    x = random_rows(rng)
    x[:, K + 3 :] = -np.inf
    x[0, 5:] = -np.inf  # fewer than k that are not
    x[1] = -np.inf
    return x[:, rng.permutation(N)]


def rows_of_ties(rng):
    return rng.integers(-3, 3, (ROWS, N)) * 0.5


def near_neighbors(rng):
    """Numbers that differ in their last bits, two of each that agree in the others."""
    pairs = np.repeat(8 + rng.permutation(N // 2), 2).astype(np.float32)
    pairs[1::2] = np.nextafter(pairs[1::2], np.float32(np.inf))
    return np.stack([pairs[rng.permutation(N)] for _ in range(ROWS)])


def runs_of_near_neighbors(rng):
    """Numbers that all agree in their first half."""
    ones = np.float32(8) + np.float32(2**-20) * rng.permutation(N).astype(np.float32)
    return np.stack([ones[rng.permutation(N)] for _ in range(ROWS)])


KINDS = (random_rows, rows_with_missing_ones, rows_of_ties, near_neighbors, runs_of_near_neighbors)


def by_integers(dtype, k):
    return quick_compile.jit(lambda x: selection.top_k_by_integers(x, k, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("k", [1, K, N])
def test_the_order_is_that_of_top_k(dtype, k):
    found, rng = by_integers(dtype, k), np.random.default_rng(k)
    for kind in KINDS:
        x = jnp.asarray(kind(rng), dtype).astype(jnp.float32)
        wanted = lax.top_k(canonical(x), k)
        chex.assert_trees_all_equal(found(x), tuple(wanted), custom_message=kind.__name__)


def test_minus_zero_is_zero_and_the_first_of_equal_ones_comes_first():
    x = jnp.asarray([[0.0, -0.0, 1.0, -0.0]])
    values, places = by_integers("float32", 4)(x)
    assert places.tolist() == [[2, 0, 1, 3]]
    assert np.signbit(np.asarray(values)).tolist() == [[False] * 4]


def test_numbers_that_agree_in_their_first_half_need_the_order_of_the_second(monkeypatch):
    x = jnp.asarray(near_neighbors(np.random.default_rng(0)), jnp.float32)
    monkeypatch.setitem(selection.ZEROS, "float32", selection.HALF)
    _, places = selection.top_k_by_integers(x, K, "float32")
    assert not np.array_equal(places, lax.top_k(x, K)[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [selection.SEARCHED - 1, selection.SEARCHED, 250])
def test_k_keys_and_few_more_reach_the_key_that_is_found(dtype, n):
    keys = ordered_keys(jnp.asarray(np.random.default_rng(n).normal(size=(ROWS, n)), dtype))
    exact = n < selection.SEARCHED or dtype == "bfloat16"
    for k in (1, 64, n):
        bound = np.asarray(quick_compile.jit(lambda x, k=k: selection.reached_by(x, k))(keys))
        kth = np.sort(np.asarray(keys), axis=1)[:, -k]
        chex.assert_trees_all_equal(bound, kth if exact else kth >> 16 << 16)
