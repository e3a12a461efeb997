"""`vmap`, `jvp`, `grad` and the control flow of JAX, against loops and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy, topk_logprobs
from tests.support import quick_compile
from tests.support.changed_logits import ALL, changes_of

N, V, K = 6, 4099, 4  # more rows than a block


def rows(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (N, V)).astype(np.float32)
    x[1, ::5] = -np.inf
    x[2, 7] = np.nan
    return x.astype(dtype)


IDS = np.array([1, 2, 3, V, 4, 5, -1, 7], np.int32)


def arguments(seed):
    """One call's arguments, changes too."""
    rng = np.random.default_rng(seed + 1)
    return {
        "logits": rows(seed, jnp.bfloat16),
        "token_ids": IDS + seed,
        "row_ids": np.roll(np.int32([0, 3, 3, 1, 2, -1, 5, 4]), seed),
        "num_rows": np.int32(7 - 3 * seed),
        "temperatures": np.roll(np.float32([1, 0.5, 2, 1, 1, 1, 0, 3]), seed),
        "extra_token_ids": rng.integers(-1, V + 1, (8, 2)).astype(np.int32),
        **changes_of(rng, len(IDS), V),
    }


def stacked(results):
    return jax.tree.map(lambda *parts: np.stack(parts), *jax.device_get(list(results)))


def assert_same_bits(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), actual, expected)


@pytest.mark.parametrize("own", [("logits",), pytest.param(None, marks=pytest.mark.long)])
def test_vmap_gives_the_bits_of_a_loop(own):
    """Whatever the batch has of its own, changes too; an odd vocabulary leaves no row aligned."""
    given = [arguments(seed) for seed in range(3)]
    own = given[0].keys() if own is None else own
    shared = {name: x for name, x in given[0].items() if name not in own}

    def call(one):
        return topk_logprobs(**one, **shared, k=K, rank_ties="inclusive", **ALL)

    batch = [{name: one[name] for name in own} for one in given]
    expected = stacked(map(quick_compile.as_users(call), batch))
    together = jax.tree.map(lambda *parts: np.stack(parts), *batch)
    assert_same_bits(quick_compile.as_users(jax.vmap(call))(together), expected)


def test_a_batch_of_batches_and_of_greedy_choices():
    x = np.stack([np.stack([rows(2 * i + j) for j in range(2)]) for i in range(3)])
    count = np.array([[0, 1], [6, 3], [2, 5]], np.int32)
    changes = changes_of(np.random.default_rng(0), N, V)

    def of_choice(x, count):
        chosen = greedy(x)
        return topk_logprobs(x, chosen.token_ids, K, num_rows=count, **changes, **ALL), chosen

    one = quick_compile.jit(of_choice)
    found = quick_compile.jit(jax.vmap(jax.vmap(of_choice)))(x, count)
    each = [stacked(one(x[i, j], count[i, j]) for j in (0, 1)) for i in range(3)]
    assert_same_bits(found, stacked(each))
    shared = quick_compile.jit(jax.vmap(of_choice, (None, 0)))(x[0, 0], count[0])
    assert_same_bits(shared, stacked(one(x[0, 0], number) for number in count[0]))


def test_gradients_in_a_batch_and_in_a_scan():
    """More rows than a block: the loop over blocks has no derivative of its own."""
    x = np.stack([rows(1), rows(2)])

    def loss(x):
        found = topk_logprobs(x, IDS[:N], K).logprobs
        return jnp.square(jnp.where(jnp.isfinite(found), found, 0)).sum()

    def scanned(x):
        step = jax.checkpoint(loss)
        return jax.lax.scan(lambda total, one: (total + step(one), None), 0.0, x)[0]

    plain = quick_compile.jit(jax.grad(loss))
    expected = np.stack([plain(one) for one in x])
    for call in (jax.vmap(jax.grad(loss)), jax.grad(scanned)):
        np.testing.assert_allclose(quick_compile.jit(call)(x), expected, atol=1e-5)


def test_ids_and_ranks_have_no_derivative():
    x = rows()

    def loss(x):
        chosen = greedy(x).token_ids
        out = topk_logprobs(x, chosen, K)
        total = out.token_ids.sum() + out.token_ranks.sum() + chosen.sum()
        return total.astype(jnp.float32)

    assert not np.asarray(quick_compile.jit(jax.grad(loss))(x)).any()


def test_nothing_is_transferred_that_was_not_asked_for():
    x, ids = jnp.asarray(rows()), jnp.asarray(IDS[:N])
    calls = [
        functools.partial(topk_logprobs, x, ids, K),
        functools.partial(topk_logprobs, x, ids, K, num_rows=3),
        functools.partial(greedy, x),
    ]
    with jax.transfer_guard("disallow"):
        for call in calls:
            call()
        with pytest.raises(Exception, match="Disallowed"):
            x + np.float32(1)  # the guard is on
