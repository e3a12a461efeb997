"""Derivatives of every result by logits, temperatures and biases, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import topk_logprobs
from pallas_kernels.testing import oracle
from tests.support import quick_compile
from tests.support.changed_logits import ALL, changes_of
from tests.support.lowered import array, temporaries

R, V, K = 4, 50, 2
# Repeated, skipped and invalid rows; ids outside the vocabulary; every kind of temperature.
ROWS = np.array([0, 1, 1, -1, 2, 3, R, 0], np.int32)
IDS = np.array([0, 9, 11, 3, V, 5, 1, -1], np.int32)
T = np.array([0, 0.5, 2, 1, 3, 1, 1, 0.3], np.float32)
EXTRA = np.random.default_rng(2).integers(-1, V + 1, (len(IDS), 2)).astype(np.int32)


@functools.cache
def inputs():
    rng = np.random.default_rng(1)
    x = rng.normal(0, 2, (R, V)).astype(np.float32)
    x[3, 7] = np.nan
    changes = changes_of(rng, len(IDS), V)
    changes["allowed"][:] = np.uint32(2**32 - 1)
    changes["allowed"][1, 0] -= np.uint32(1 << 9)  # the given token of this target is forbidden
    changes["bias"] = rng.choice([-1, 0.25, 2], changes["bias"].shape).astype(np.float32)
    changes["bias_token_ids"][0, 2] = IDS[0]
    return x, changes


def in_float64(x, t, bias):
    """[targets, results]: all that has a derivative; zeros where there is no answer."""
    _, changes = inputs()
    out = np.zeros((len(IDS), 2 * K + 5))
    for r, row in enumerate(ROWS):
        if not 0 <= row < R or not oracle.is_valid(x[row]):
            continue
        moved = x[row].copy()
        for token, number in zip(changes["bias_token_ids"][r], bias[r], strict=True):
            if 0 <= token < V:
                moved[token] += number
        if r == 1:
            moved[9] = -np.inf
        lp, top = oracle.log_softmax(moved, t[r]), oracle.top_ids(moved, K)
        named = [lp[i] if 0 <= i < V else 0.0 for i in (IDS[r], *EXTRA[r])]
        sums = oracle.log_sum_exp(moved, t[r]), oracle.entropy(lp)
        out[r] = [*lp[top], *moved[top], *sums, *named]
    return np.where(np.isfinite(out), out, 0)


def results(x, t, bias):
    changes = {**inputs()[1], "bias": bias}
    out = topk_logprobs(
        x, IDS, K, row_ids=ROWS, temperatures=t, extra_token_ids=EXTRA, **changes, **ALL
    )
    sums = jnp.stack([out.log_sum_exp, out.entropy, out.logprobs[:, 0]], axis=1)
    found = jnp.concatenate([out.logprobs[:, 1:], out.top_logits, sums, out.extra_logprobs], axis=1)
    return jnp.where(jnp.isfinite(found), found, 0)


@pytest.mark.fast
def test_jvp_is_the_slope_and_grad_its_transpose():
    """By logits, temperatures and biases at once, against differences in float64."""
    (x, changes), rng = inputs(), np.random.default_rng(3)
    primals = x, T, changes["bias"]
    tangents = [rng.normal(size=one.shape).astype(np.float32) for one in primals]
    value, slope = quick_compile.jit(lambda p, d: jax.jvp(results, p, tuple(d)))(primals, tangents)

    def moved(h):  # a temperature of 0 is read as 1 and stays that
        x, t, bias = (a.astype(np.float64) + h * d for a, d in zip(primals, tangents, strict=True))
        return in_float64(x, np.where(T == 0, 1, t), bias)

    h = 1e-5
    np.testing.assert_allclose(value, moved(0), atol=2e-5)
    np.testing.assert_allclose(slope, (moved(h) - moved(-h)) / (2 * h), rtol=3e-4, atol=3e-4)
    weights = rng.normal(size=slope.shape).astype(np.float32)

    def weighted(*given):
        return jnp.sum(results(*given) * weights)

    gradients = quick_compile.jit(jax.grad(weighted, argnums=(0, 1, 2)))(*primals)
    along = sum(np.vdot(a, b) for a, b in zip(gradients, tangents, strict=True))
    np.testing.assert_allclose(along, np.vdot(slope, weights), rtol=1e-4)
    assert np.flatnonzero(np.abs(gradients[0]).max(axis=1)).tolist() == [0, 1, 2]
    of_bfloat16 = quick_compile.jit(jax.grad(weighted))(x.astype(jnp.bfloat16), *primals[1:])
    assert of_bfloat16.dtype == jnp.bfloat16
    np.testing.assert_allclose(of_bfloat16.astype(np.float32), gradients[0], atol=0.1)


def test_a_gradient_takes_no_array_of_the_logits_size():
    def loss(x):
        found = topk_logprobs(x, jnp.zeros(256, jnp.int32), 0, entropy=True)
        return found.logprobs.sum() + found.entropy.sum()

    logits = array((256, 4_000), "float32")
    assert temporaries(jax.grad(loss), logits) < logits.size * 4 / 2
