"""`vmap` and derivatives of the optional results, and by biases, against loops and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy_topk_logprobs, topk_logprobs
from pallas_kernels.testing import oracle
from pallas_kernels.topk import derivatives
from tests.support import quick_compile
from tests.support.changed_logits import ALL, changes_of, in_float64

R, V, K = 3, 50, 2
IDS = np.array([0, 9, 11], np.int32)


def inputs(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 2, (R, V)).astype(np.float32)
    changes = changes_of(rng, R, V)
    changes["allowed"][:] = np.uint32(2**32 - 1)
    changes["allowed"][1, 0] -= np.uint32(1 << 9)  # the given token of row 1 is forbidden
    numbers = rng.choice([-1, 0.25, 2], changes["bias"].shape)
    changes["bias"] = numbers.astype(np.float32)
    changes["bias_token_ids"][0, 2] = IDS[0]
    return x, changes


@pytest.mark.parametrize("greedy", [False, True])
def test_vmap_gives_the_bits_of_a_loop(greedy):
    given = [inputs(seed) for seed in range(2)]

    @quick_compile.jit
    def call(x, changes):
        options = {**changes, **ALL, "rank_ties": "inclusive"}
        if greedy:
            return greedy_topk_logprobs(x, K, num_rows=np.int32(2), **options)
        return topk_logprobs(x, IDS, K, **options)

    expected = jax.tree.map(lambda *parts: np.stack(parts), *[call(*one) for one in given])
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *given)
    found = jax.vmap(call)(*stacked)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    shared = jax.vmap(call, (None, 0))(given[0][0], stacked[1])
    expected = [call(given[0][0], changes) for _, changes in given]
    jax.tree.map(
        lambda a, *parts: np.testing.assert_array_equal(a, np.stack(parts)), shared, *expected
    )


def of_float64(x, t, changes):
    """Each result that has a derivative, with the ids of the unmoved rows."""
    out = []
    for row, temperature, token in zip(in_float64(x, changes), t, IDS, strict=True):
        lp = oracle.log_softmax(row, temperature)
        top = oracle.top_ids(row, K)
        out.append([*lp[top], *row[top], oracle.log_sum_exp(row, temperature), oracle.entropy(lp)])
        out[-1].append(lp[token] if row[token] > -np.inf else 0.0)
    return np.array(out)


def changed64(x, changes, h, dx, dbias):
    """Rows in float64, moved: float32 sums would drown the differences."""
    moved = x.astype(np.float64) + h * dx
    for r in range(R):
        numbers = changes["bias"][r] + h * dbias[r]
        for token, number in zip(changes["bias_token_ids"][r], numbers, strict=True):
            if 0 <= token < V:
                moved[r, token] += number
    moved[1, 9] = -np.inf
    return moved


@functools.cache
def program():
    def results(x, t, bias, changes):
        out = topk_logprobs(x, IDS, K, temperatures=t, **{**changes, "bias": bias}, **ALL)
        given = jnp.where(jnp.isfinite(out.logprobs[:, 0]), out.logprobs[:, 0], 0)
        return jnp.concatenate(
            [
                out.logprobs[:, 1:], out.top_logits,
                jnp.stack([out.log_sum_exp, out.entropy, given], axis=1),
            ], axis=1,
        )  # fmt: skip

    return results


def compare():
    x, changes = inputs(1)
    rng = np.random.default_rng(3)
    dx, dbias = rng.normal(size=x.shape), rng.normal(size=changes["bias"].shape)
    t, dt = np.array([0, 0.5, 2], np.float32), np.array([0.3, -0.2, 0.5], np.float32)
    call = functools.partial(program(), changes=changes)
    primals = (x, t, changes["bias"])
    tangents = (dx.astype(np.float32), dt, dbias.astype(np.float32))
    value, slope = quick_compile.jit(lambda p, d: jax.jvp(call, p, d))(primals, tangents)

    def moved(h):  # a temperature of 0 is read as 1 and stays that
        other = np.where(t == 0, 1, t + h * dt.astype(np.float64))
        return of_float64(changed64(x, changes, h, dx, dbias), other, {})

    h = 1e-5
    np.testing.assert_allclose(value, moved(0), atol=2e-5)
    np.testing.assert_allclose(slope, (moved(h) - moved(-h)) / (2 * h), rtol=3e-4, atol=3e-4)
    return primals, tangents, call, slope


def test_jvp_is_the_slope_and_grad_its_transpose():
    """By logits, temperatures and biases at once, against differences in float64."""
    primals, tangents, call, slope = compare()
    weights = np.random.default_rng(4).normal(size=slope.shape).astype(np.float32)

    def weighted(*given):
        return jnp.where(weights == 0, 0, call(*given) * weights).sum()

    gradients = quick_compile.jit(jax.grad(weighted, argnums=(0, 1, 2)))(*primals)
    along = sum(np.vdot(a, b) for a, b in zip(gradients, tangents, strict=True))
    np.testing.assert_allclose(along, np.vdot(slope, weights), rtol=1e-4)


@pytest.mark.slow
def test_a_wrong_derivative_would_be_noticed(monkeypatch):
    """Negative control: the biases' derivatives are forgotten."""
    right = derivatives._changed

    def wrong(shard, rows, moved):
        changes = moved.changes._replace(bias=moved.changes.bias * 0)
        return right(shard, rows, moved._replace(changes=changes))

    monkeypatch.setattr(derivatives, "_changed", wrong)
    with pytest.raises(AssertionError):
        compare()


def test_a_row_without_a_token_has_the_derivatives_of_its_sums():
    x = np.stack([*inputs(3)[0], np.full(V, np.nan)]).astype(np.float32)
    ids = np.full(4, -1, np.int32)

    @jax.jit
    def found(x):
        def total(x, name):
            return getattr(topk_logprobs(x, ids, 0, log_sum_exp=True, entropy=True), name).sum()

        return jnp.stack([jax.grad(total)(x, name) for name in ("log_sum_exp", "entropy")])

    p = jax.nn.softmax(x[:3])
    of_entropy = -p * (jnp.log(p) - (p * jnp.log(p)).sum(1, keepdims=True))
    np.testing.assert_allclose(found(x)[:, :3], [p, of_entropy], atol=1e-6)
    np.testing.assert_array_equal(found(x)[:, 3], 0)  # of an invalid one none


def test_a_gradient_takes_no_array_of_the_logits_size():
    def loss(x):
        found = topk_logprobs(x, jnp.zeros(256, jnp.int32), 0, entropy=True)
        return found.logprobs.sum() + found.entropy.sum()

    shape = jax.ShapeDtypeStruct((256, 4_000), "float32")
    memory = jax.jit(jax.grad(loss)).lower(shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < shape.size * 4 / 2
