"""`vmap`, `jvp`, `grad` and the control flow of JAX, against loops and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy, greedy_topk_logprobs, topk_logprobs
from pallas_kernels.testing import oracle
from pallas_kernels.topk import derivatives
from tests.support import quick_compile

N, V, K = 6, 4099, 4  # more rows than a block: the loop over blocks has no derivative of its own


def rows(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (N, V)).astype(np.float32)
    x[1, ::5] = -np.inf
    x[2, 7] = np.nan
    return x.astype(dtype)


def arguments(seed=0):
    rng = np.random.default_rng(seed + 1)
    return {
        "row_ids": np.array([0, 3, 3, 1, 2, -1, 5, 4], np.int32),
        "num_rows": np.int32(7),
        "temperatures": np.array([1, 0.5, 2, 1, 1, 1, 0, 3], np.float32),
        "extra_token_ids": rng.integers(-1, V + 1, (8, 2)).astype(np.int32),
    }


IDS = np.array([1, 2, 3, V, 4, 5, -1, 7], np.int32)


def stacked(results):
    return jax.tree.map(lambda *parts: np.stack(parts), *jax.device_get(list(results)))


def assert_same_bits(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), actual, expected)


@pytest.mark.parametrize(
    "batched",
    [
        "logits",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("row_ids", "num_rows", "temperatures")
        ),
        "all",
    ],
)
def test_vmap_gives_the_bits_of_a_loop(batched):
    """Whatever the batch has of its own; an odd vocabulary leaves no row aligned."""
    given = [
        {"logits": rows(seed, jnp.bfloat16), "token_ids": IDS + seed, **arguments(seed)}
        for seed in range(3)
    ]
    for seed, one in enumerate(given):
        one["row_ids"] = np.roll(one["row_ids"], seed)
        one["num_rows"] = np.int32(7 - 3 * seed)
        one["temperatures"] = np.roll(one["temperatures"], seed)
    names = list(given[0])
    own = names if batched == "all" else [batched]

    def call(*values):
        return topk_logprobs(**dict(zip(names, values, strict=True)), k=K)

    values = [
        np.stack([one[name] for one in given]) if name in own else given[0][name] for name in names
    ]
    axes = [0 if name in own else None for name in names]
    one_call = quick_compile.as_users(call)
    expected = stacked(
        one_call(*(one[name] if name in own else given[0][name] for name in names)) for one in given
    )
    assert_same_bits(quick_compile.as_users(jax.vmap(call, axes))(*values), expected)


def test_a_batch_of_batches_and_the_greedy_calls():
    x = np.stack([np.stack([rows(2 * i + j) for j in range(2)]) for i in range(3)])
    count = np.array([[0, 1], [6, 3], [2, 5]], np.int32)

    def fused(x, count):
        return greedy_topk_logprobs(x, K, num_rows=count)

    compiled = quick_compile.jit
    one, choice = compiled(fused), compiled(greedy)
    found = compiled(jax.vmap(jax.vmap(fused)))(x, count)
    each = [stacked(one(x[i, j], count[i, j]) for j in (0, 1)) for i in range(3)]
    assert_same_bits(found, stacked(each))
    shared = compiled(jax.vmap(fused, (None, 0)))(x[0, 0], count[0])
    assert_same_bits(shared, stacked(one(x[0, 0], number) for number in count[0]))
    chosen = compiled(jax.vmap(jax.vmap(greedy)))(x)
    assert_same_bits(chosen, stacked(stacked(choice(x[i, j]) for j in (0, 1)) for i in range(3)))


def expected_gradient(x, out, weights, row_ids, temperatures):
    """d sum(weights * logprobs) / d logits in float64, row by row."""
    x = np.asarray(x, np.float64)
    gradient = np.zeros_like(x)
    for r, row in enumerate(row_ids):
        if not 0 <= row < len(x) or not oracle.is_valid(x[row]):
            continue
        t = float(temperatures[r]) or 1.0
        p = np.exp(oracle.log_softmax(x[row], t))
        for token, logprob, weight in zip(
            *(np.asarray(y)[r] for y in (*out, weights)), strict=True
        ):
            if 0 <= token < x.shape[1] and not np.isnan(logprob):
                gradient[row] -= weight * p / t
                gradient[row, token] += weight / t
    return gradient


def weighted(x, weights, given=None):
    given = arguments() if given is None else given
    out = topk_logprobs(x, IDS, K, **given)
    found = jnp.concatenate([out.logprobs, out.extra_logprobs], axis=1)
    ids = jnp.concatenate([out.token_ids, given["extra_token_ids"]], axis=1)
    usable = jnp.isfinite(found)
    return jnp.where(usable, found * weights, 0).sum(), (ids, jnp.where(usable, found, jnp.nan))


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.fast), jnp.bfloat16])
def test_gradients_are_those_of_float64(dtype):
    """Repeated, skipped and invalid rows, ids outside the vocabulary, every kind of temperature."""
    x = rows(dtype=dtype)
    weights = np.random.default_rng(5).normal(size=(8, K + 3)).astype(np.float32)
    gradient, out = quick_compile.jit(jax.grad(weighted, has_aux=True))(x, weights)
    assert gradient.dtype == x.dtype
    given = arguments()
    row_ids = np.where(np.arange(8) < 7, given["row_ids"], -1)
    expected = expected_gradient(x, out, weights, row_ids, given["temperatures"])
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, atol=tolerance)
    assert (
        np.count_nonzero(np.abs(expected).max(1)) == 4
    )  # of rows 2 (invalid) and 4 (skipped), none


@pytest.mark.slow
def test_a_wrong_derivative_would_be_noticed(monkeypatch):
    """Negative control of the test above: the mean is forgotten."""
    monkeypatch.setattr(derivatives.VocabShard, "sum", lambda self, x: x[..., 0] * 0 + 1)
    with pytest.raises(AssertionError):
        test_gradients_are_those_of_float64(jnp.float32)


def test_jvp_is_the_slope():
    """Along a direction of the logits and of the temperatures, against differences in float64."""
    rng = np.random.default_rng(3)
    x = rng.normal(0, 2, (3, 50)).astype(np.float32)
    dx = rng.normal(size=(3, 50)).astype(np.float32)
    t, dt = np.array([1, 0.5, 2], np.float32), np.array([0.3, -0.2, 0.5], np.float32)
    ids = np.array([4, 9, 11], np.int32)

    def logprob(x, t):
        return topk_logprobs(x, ids, 0, temperatures=t).logprobs[:, 0]

    value, slope = quick_compile.jit(lambda *given: jax.jvp(logprob, *given))((x, t), (dx, dt))

    def in_float64(h):
        moved = x.astype(np.float64) + h * dx, t.astype(np.float64) + h * dt
        return [oracle.log_softmax(a, b)[i] for a, b, i in zip(*moved, ids, strict=True)]

    h = 1e-4
    expected = (np.array(in_float64(h)) - np.array(in_float64(-h))) / (2 * h)
    np.testing.assert_allclose(value, in_float64(0), atol=1e-5)
    np.testing.assert_allclose(slope, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_gradients_in_a_batch_and_in_loops():
    """vmap of grad; grad through scan, cond and remat: all equal to the plain gradient."""
    weights = jnp.ones((8, K + 3))
    x = np.stack([rows(1), rows(2)])
    plain = jax.jit(jax.grad(lambda x: weighted(x, weights)[0]))
    expected = np.stack([plain(one) for one in x])

    def close(actual):
        np.testing.assert_allclose(actual, expected, atol=1e-6)

    close(jax.jit(jax.vmap(plain))(x))

    def scanned(x):
        return jax.lax.scan(lambda total, one: (total + weighted(one, weights)[0], None), 0.0, x)[0]

    close(jax.jit(jax.grad(scanned))(x))

    def chosen(x, flag):
        loss = jax.checkpoint(lambda x: weighted(x, weights)[0])
        return jax.lax.cond(flag, lambda x: sum(map(loss, x)), lambda x: x[0, 0, 0], x)

    close(jax.jit(jax.grad(chosen))(x, True))
    close(jax.grad(lambda x: weighted(x[0], weights)[0] + weighted(x[1], weights)[0])(x))


def test_ids_and_ranks_have_no_derivative():
    x = rows()

    def loss(x):
        out = greedy_topk_logprobs(x, K)
        total = out.token_ids.sum() + out.token_ranks.sum() + greedy(x).token_ids.sum()
        return total.astype(jnp.float32)

    assert not np.asarray(quick_compile.jit(jax.grad(loss))(x)).any()


def test_nothing_is_transferred_that_was_not_asked_for():
    x, ids = jnp.asarray(rows()), jnp.asarray(IDS[:N])
    calls = [
        functools.partial(topk_logprobs, x, ids, K),
        functools.partial(topk_logprobs, x, ids, K, num_rows=3),
        functools.partial(greedy_topk_logprobs, x, K),
        functools.partial(greedy, x),
    ]
    with jax.transfer_guard("disallow"):
        for call in calls:
            call()
        with pytest.raises(Exception, match="Disallowed"):
            x + np.float32(1)  # the guard is on
