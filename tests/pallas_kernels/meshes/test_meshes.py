"""Logits on meshes as users have them: the results of one device, and only compact parts travel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from pallas_kernels import greedy, topk_logprobs
from tests.support import quick_compile
from tests.support.changed_logits import ALL, changes_of
from tests.support.collectives import longest_axis
from tests.support.quick_compile import UNOPTIMIZED as QUICK
from tests.support.shards import P, users_mesh

N, V, K = 8, 1024, 5
SPLITS = {
    "neither": P(),
    "rows": P("data", None),
    "vocabulary": P(None, "model"),
    "both": P("data", "model"),
    "rows over both axes": P(("data", "model"), None),
}


LOGITS = np.round(np.random.default_rng(0).normal(0, 3, (N, V)), 1).astype(np.float32)  # ties
LOGITS[3, 100], LOGITS[5] = np.nan, -np.inf


@functools.cache
def expected(call):
    return quick_compile.jit(CALLS[call])(LOGITS)


def some_rows(x):
    """Targets in another order than the rows, repeated and skipped, with all options."""
    given = {
        "row_ids": np.int32([7, 0, -1, 3, 7]),
        "num_rows": np.int32(4),
        "temperatures": np.float32([1, 0.5, 1, 1, 2]),
        "extra_token_ids": np.int32([[1, 2]] * 5),
        **changes_of(np.random.default_rng(5), 5, V),
    }
    return topk_logprobs(x, np.int32([4, 511, 0, 9, 77]), K, **given, **ALL)


CHANGES = changes_of(np.random.default_rng(N), N, V)
CALLS = {
    "every row": lambda x: topk_logprobs(x, np.arange(N, dtype=np.int32), K, num_rows=6),
    "some rows": some_rows,
    "changed": lambda x: topk_logprobs(x, greedy(x).token_ids, K, **CHANGES, **ALL),
    "greedy": greedy,
}


def placed(kind, split):
    return jax.device_put(LOGITS, NamedSharding(users_mesh(kind), SPLITS[split]))


def assert_close(actual, expected):
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        if a.dtype == jnp.float32:
            np.testing.assert_allclose(a, b, rtol=4e-7, atol=2e-5)
        else:
            np.testing.assert_array_equal(a, b)


# Each call, split and kind of axes in some combination.
@pytest.mark.parametrize(("kind", "split", "call"), [
    ("explicit", "both", "some rows"), ("explicit", "both", "changed"),
    pytest.param("automatic", "both", "some rows", marks=pytest.mark.slow),
    pytest.param("automatic", "both", "changed", marks=pytest.mark.slow),
    pytest.param("explicit", "both", "greedy", marks=pytest.mark.fast),
    pytest.param("automatic", "rows over both axes", "every row", marks=pytest.mark.fast),
    ("automatic", "vocabulary", "greedy"),
    pytest.param("explicit", "rows", "some rows", marks=pytest.mark.slow),
    ("explicit", "neither", "every row"),
])  # fmt: skip
def test_jitted_calls_give_the_results_of_one_device(kind, split, call):
    """No collective carries a row of logits; the results are split as the rows are."""
    x = placed(kind, split)
    with jax.set_mesh(users_mesh(kind)):
        program = jax.jit(CALLS[call]).lower(x).compile(QUICK)
    found = program(x)
    assert_close(found, expected(call))
    assert longest_axis(program) < V // 4  # a part of a row has so much at least
    rows = SPLITS[split][0] if SPLITS[split] else None
    if rows is not None and call != "some rows":
        assert all(part.sharding.spec[0] == rows for part in jax.tree.leaves(found) if part.size)


@pytest.mark.parametrize(("kind", "call"), [("explicit", "some rows"), ("automatic", "greedy")])
def test_calls_outside_of_jit(kind, call):
    x = placed(kind, "both")
    with jax.set_mesh(users_mesh(kind)):
        assert_close(CALLS[call](x), expected(call))


@pytest.mark.parametrize("kind", ["explicit", pytest.param("automatic", marks=pytest.mark.slow)])
def test_gradients_on_a_mesh(kind):
    """The gradient is split as the logits are, and equal to one device's."""
    given = np.random.default_rng(2).normal(size=(N, V)).astype(np.float32)

    def loss(x):
        return jnp.square(topk_logprobs(x, np.arange(N, dtype=np.int32), K).logprobs).sum()

    with jax.set_mesh(users_mesh(kind)):
        x = jax.device_put(given, NamedSharding(users_mesh(kind), SPLITS["both"]))
        found = quick_compile.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(found, quick_compile.jit(jax.grad(loss))(given), atol=2e-5)
