"""The selection in a CPU's form beside the plain one: its bound, what it collects, its branches."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends.xla import selection
from pallas_kernels.lowering.forms import ordered_keys
from tests.support import quick_compile

VOCABULARY = 4001  # the last group is short
ROWS = 5


def random_rows(rng, dtype):
    return rng.normal(size=(ROWS, VOCABULARY)).astype(jnp.dtype(dtype))


def equal_rows(rng, dtype):
    """Every group has the same maximum: there is no room for all that reach the bound."""
    return np.zeros((ROWS, VOCABULARY), jnp.dtype(dtype))


def masked_rows(rng, dtype):
    """Few finite logits, fewer than k in one row."""
    x = np.full((ROWS, VOCABULARY), -np.inf)
    for row, count in enumerate((3, 60, 900, 40, 48)):
        x[row, rng.choice(VOCABULARY, count, replace=False)] = rng.normal(size=count)
    return x.astype(jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("rows", "complete"), [(random_rows, True), (masked_rows, True), (equal_rows, False)]
)
def test_what_is_collected_is_all_but_in_ties(rows, complete):
    k, width = 48, 16
    x = rows(np.random.default_rng(0), jnp.float32)

    @quick_compile.jit
    def collected(x):
        maxima = selection.group_maxima(x, width)
        bound = selection.lower_bound(maxima, k)
        return selection._collected(x, maxima, bound, k, width)[1]

    found = collected(x)
    few = (np.asarray(x) > -np.inf).sum(axis=1) <= 2 * k
    assert np.all(np.asarray(found)[few if rows is masked_rows else slice(None)] == complete)


@pytest.mark.parametrize("k", [1, 5, 48])
def test_at_least_k_maxima_reach_the_bound_and_of_random_ones_at_most_twice_as_many(k):
    keys = jnp.asarray(np.random.default_rng(k).integers(-(2**31), 2**31, (16, 2000)), jnp.int32)
    bound = quick_compile.jit(lambda keys: selection.lower_bound(keys, k))(keys)
    reached = (np.asarray(keys) >= np.asarray(bound)[:, None]).sum(axis=1)
    assert np.all(reached >= k)
    assert np.median(reached) <= 2 * k


def test_there_is_no_bound_where_most_groups_are_wanted():
    assert selection.lower_bound(jnp.zeros((2, 100), jnp.int32), 60) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [selection.SEARCHED - 1, selection.SEARCHED, 250])
def test_k_keys_and_few_more_reach_the_key_that_is_found(dtype, n):
    keys = ordered_keys(jnp.asarray(np.random.default_rng(n).normal(size=(ROWS, n)), dtype))
    bound = np.asarray(quick_compile.jit(lambda keys: selection.reached_by(keys, 64))(keys))
    kth = np.sort(np.asarray(keys), axis=1)[:, -64]
    exact = n < selection.SEARCHED or dtype == "bfloat16"
    np.testing.assert_array_equal(bound, kth if exact else kth >> 16 << 16)
