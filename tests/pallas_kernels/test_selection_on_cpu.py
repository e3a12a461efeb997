"""The selection in a CPU's form beside the plain one: its bound, what it collects, its branches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_kernels.backends.xla import selection
from tests.support import quick_compile

VOCABULARY = 4001  # the last group is short
ROWS = 5


def random_rows(rng, dtype):
    return rng.normal(size=(ROWS, VOCABULARY)).astype(jnp.dtype(dtype))


def equal_rows(rng, dtype):
    """Every group has the same maximum: there is no room for all that reach the bound."""
    return np.zeros((ROWS, VOCABULARY), jnp.dtype(dtype))


def rows_of_ties(rng, dtype):
    return rng.integers(-3, 3, (ROWS, VOCABULARY)).astype(jnp.dtype(dtype))


def masked_rows(rng, dtype):
    """Few finite logits, fewer than k in one row."""
    x = np.full((ROWS, VOCABULARY), -np.inf)
    for row, count in enumerate((3, 60, 900, 40, 48)):
        x[row, rng.choice(VOCABULARY, count, replace=False)] = rng.normal(size=count)
    return x.astype(jnp.dtype(dtype))


def descending_rows(rng, dtype):
    """All large logits are neighbours."""
    return np.tile(np.arange(VOCABULARY, 0, -1), (ROWS, 1)).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("k", "width", "vocabulary"),
    [(1, 8, VOCABULARY), (20, 8, VOCABULARY), (48, 8, VOCABULARY), (48, 16, VOCABULARY - 43)],
)
def test_both_forms_select_the_same(k, width, vocabulary, dtype):
    @quick_compile.jit
    def both(x):
        maxima = selection.group_maxima(x, width)
        return tuple(
            selection.select_top_k(x, maxima, k, width, form)
            for form in (selection.from_groups, selection.from_groups_on_cpu)
        )

    rng = np.random.default_rng(k)
    for rows in (random_rows, equal_rows, rows_of_ties, masked_rows, descending_rows):
        plain, on_cpu = both(rows(rng, dtype)[:, :vocabulary])
        chex.assert_trees_all_equal(plain, on_cpu, custom_message=rows.__name__)


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


@pytest.mark.parametrize(("entries", "size"), [(1, 1), (31, 5), (33, 33), (64, 7), (500, 600)])
def test_the_first_places_are_those_of_true_entries_in_order(entries, size):
    share = np.array([0, 0.3, 0.3, 0.3, 1])[:, None]
    flags = np.random.default_rng(entries).random((5, entries)) < share
    expected = np.zeros((5, size), np.int32)
    for row, found in zip(expected, flags, strict=True):
        places = np.flatnonzero(found)[:size]
        row[: len(places)] = places

    def call(flags):
        return selection.first_places(flags, size)

    chex.assert_trees_all_equal(quick_compile.jit(call)(flags), (expected, flags.sum(1, np.int32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 17, 50_000])
def test_the_largest_of_each_row(size, dtype):
    x = jnp.asarray(np.random.default_rng(size).normal(size=(3, size)), dtype)
    expected = np.asarray(x).astype(np.float32).max(axis=1)

    @quick_compile.jit
    def ways(x):
        keys = selection.group_maxima(x, 8)
        return (
            selection.row_maximum(x), selection.row_maximum_on_cpu(x),
            selection.largest(keys, dtype), selection.largest_on_cpu(keys, dtype),
        )  # fmt: skip

    for found in ways(x):
        chex.assert_trees_all_equal(np.asarray(found), expected)


def test_a_symbolic_number_of_rows():
    (rows,) = export.symbolic_shape("r")
    k, width = 48, 8

    def select(x):
        maxima = selection.group_maxima(x, width)
        form = selection.from_groups_on_cpu
        return selection.select_top_k(x, maxima, k, width, form)

    shape = jax.ShapeDtypeStruct((rows, VOCABULARY), jnp.float32)
    made = export.export(quick_compile.jit(select), platforms=["cpu"])(shape)
    for count in (1, 6):
        x = jnp.asarray(np.random.default_rng(count).normal(size=(count, VOCABULARY)), jnp.float32)
        ids, values = made.call(x)
        expected, expected_ids = jax.lax.top_k(x, k)
        chex.assert_trees_all_equal((ids, values), (expected_ids, expected))
