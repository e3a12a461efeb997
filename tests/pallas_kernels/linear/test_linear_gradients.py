"""The derivatives of `linear_topk_logprobs` and `linear_kept_logprobs`: float64, and autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_kept_logprobs, linear_topk_logprobs
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.linear import schedule as schedules
from pallas_kernels.linear.types import Definition
from tests.support import linear_cases, quick_compile

N, V, R, K = 12, 300, 15, 3
DEFINITION = Definition(0.5, 5.0)


@functools.cache
def case(dtype="float32"):
    rng = np.random.default_rng(0)
    return {
        "hidden": jnp.asarray(rng.normal(size=(N, 32)), dtype),
        "head": jnp.asarray(rng.normal(size=(V, 32)) * 0.3, dtype),
        "bias": jnp.asarray(rng.normal(size=V), jnp.float32),
        "temperatures": jnp.asarray([0, *rng.uniform(0.5, 2, R - 2), -1], jnp.float32),
    }


RNG = np.random.default_rng(1)
IDS = jnp.asarray(RNG.integers(0, V, R), jnp.int32)
EXTRA = jnp.asarray(RNG.integers(-1, V + 1, (R, 2)), jnp.int32)
ROWS = jnp.asarray([4, -1, N, *RNG.permutation(N - 1), 4], jnp.int32)
WEIGHTS = [np.float32(RNG.normal(size=s)) for s in ((R, K + 1), (R, 2), (R,), (R,))]


def loss_of(out):
    """Of every differentiable result; NaN, for no answer, counts as 0."""
    results = (out.logprobs, out.extra_logprobs, out.log_sum_exp, out.entropy)
    return sum(
        jnp.sum(jnp.where(jnp.isfinite(x), x, 0) * w.astype(x.dtype))
        for x, w in zip(results, WEIGHTS, strict=True)
    )


def plain(hidden, head, bias, temperatures, top_ids, dtype):
    """The same from whole logits, differentiated by JAX, in the precision of `dtype`."""
    u = 0.5 * (hidden.astype(dtype) @ head.astype(dtype).T) + bias.astype(dtype)[None]
    x = 5 * jnp.tanh(u / 5)
    rows = jnp.clip(ROWS, 0, N - 1)
    valid = (ROWS >= 0) & (ROWS < N) & (temperatures >= 0)
    t = jnp.where(temperatures <= 0, jnp.ones_like(temperatures), temperatures).astype(dtype)
    y = jnp.where(valid[:, None], x[rows], 0) / t[:, None]
    log_sum = jax.nn.logsumexp(y, axis=1)
    logprobs = y - log_sum[:, None]

    def at(ids):
        known = valid[:, None] & (ids >= 0) & (ids < V)
        found = jnp.take_along_axis(logprobs, jnp.clip(ids, 0, V - 1), axis=1)
        return jnp.where(known, found, jnp.nan)

    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)
    named = jnp.concatenate([IDS[:, None], top_ids], axis=1)
    rest = [jnp.where(valid, x, jnp.nan) for x in (log_sum, entropy)]
    return loss_of(TopkLogprobs(named, at(named), IDS, at(EXTRA), *rest))


def ours(plan, arrays):
    named = {"row_ids": ROWS, "extra_token_ids": EXTRA, "definition": DEFINITION, **arrays}
    out = linear_cases.run(plan, token_ids=IDS, k=K, entropy=True, compiler=lambda f: f, **named)
    return loss_of(out), out.token_ids[:, 1:]


def wide():
    """The case in float64, where JAX has it."""
    return {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in case().items()}


def gradients(plan=None, dtype="float32"):
    program = quick_compile.jit(jax.grad(functools.partial(ours, plan), has_aux=True))
    return program(case(dtype))


def test_gradients_are_those_of_float64(monkeypatch):
    """Repeated, skipped and invalid rows, ids outside the vocabulary, a temperature of 0."""
    monkeypatch.setattr(schedules, "FEW_BYTES", 0)  # the backward pass takes 256 columns at a time
    found, top_ids = jax.device_get(gradients(linear_cases.ways(R, V)["columns"]))
    with jax.enable_x64(True):
        of = jax.grad(lambda arrays: plain(**arrays, top_ids=top_ids, dtype=jnp.float64))
        expected = jax.device_get(quick_compile.jit(of)(wide()))
    for name, right in expected.items():
        np.testing.assert_allclose(found[name], right, atol=3e-5, err_msg=name)
    assert (np.abs(expected["hidden"]).max(1) > 0).sum() == N - 1  # nobody reads one row
    assert found["temperatures"][0] == 0


def test_gradients_are_those_of_autodiff_of_the_plain_form():
    """In bfloat16, within what rounding the logits' change to it costs."""
    found, top_ids = gradients(dtype="bfloat16")
    arrays = case("bfloat16")
    of = jax.grad(lambda arrays: plain(**arrays, top_ids=top_ids, dtype=jnp.float32))
    for name, right in quick_compile.jit(of)(arrays).items():
        assert found[name].dtype == right.dtype
        scale = np.abs(np.asarray(right, np.float32)).max()
        np.testing.assert_allclose(
            np.asarray(found[name], np.float32), np.asarray(right, np.float32), atol=0.01 * scale
        )


def test_second_derivatives():
    """Of the gradients by states and temperatures, against autodiff of the plain form."""
    hidden, head = case()["hidden"][:5], case()["head"]
    t = jnp.asarray([0.5, 1, 2, 0.7, 1.5], jnp.float32)
    weights = np.random.default_rng(2).normal(size=(3, 5)).astype(np.float32)

    def found(hidden, t):
        out = linear_topk_logprobs(
            hidden, head, IDS[:5], 0, temperatures=t, log_sum_exp=True, entropy=True
        )
        return jnp.stack([out.logprobs[:, 0], out.log_sum_exp, out.entropy])

    def plain(hidden, t):
        y = hidden @ head.T / t[:, None]
        logprobs, log_sum = jax.nn.log_softmax(y), jax.nn.logsumexp(y, axis=1)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)
        return jnp.stack([logprobs[jnp.arange(5), IDS[:5]], log_sum, entropy])

    def second(function):
        def size(*arrays):
            slopes = jax.grad(lambda *arrays: jnp.sum(function(*arrays) * weights), (0, 1))(*arrays)
            return sum(jnp.sum(slope**2) for slope in slopes)

        return quick_compile.jit(jax.grad(size, (0, 1)))(hidden, t)

    for actual, right in zip(second(found), second(plain), strict=True):
        np.testing.assert_allclose(actual, right, 1e-4, 1e-4)


def test_forward_mode_is_refused():
    hidden, head = case()["hidden"], case()["head"]
    with pytest.raises(TypeError, match=r"jvp.*custom_vjp"):
        jax.jvp(lambda h: linear_topk_logprobs(h, head, IDS[:N], 0).logprobs, (hidden,), (hidden,))


KEPT = jnp.asarray([[*RNG.permutation(V)[:6], -1, V] for _ in range(N)], jnp.int32)
KEPT = KEPT.at[1, 4].set(KEPT[1, 2]).at[2, 0].set(0)  # twice: both count in the sum
UNKEPT = min({*range(V)} - {*KEPT[N - 3 :].ravel().tolist()})
GIVEN = jnp.asarray([*KEPT[: N - 3, 2], UNKEPT, V, UNKEPT], jnp.int32)


def kept_loss(logprobs, kept):
    finite = jnp.where(jnp.isfinite(logprobs), logprobs, 0)
    weights = jnp.arange(N, dtype=logprobs.dtype)
    return jnp.sum(finite * weights) + jnp.sum(jnp.where(jnp.isfinite(kept), kept, 0) ** 2)


def plain_kept(arrays, dtype):
    """log_softmax of the kept tokens' logits, -inf where there is none."""
    h, w, b = (arrays[name].astype(dtype) for name in ("hidden", "head", "bias"))
    x = 5 * jnp.tanh((0.5 * h @ w.T + b[None]) / 5)
    is_token = (KEPT >= 0) & (KEPT < V)
    t = arrays["temperatures"][-N:]
    valid = (t > 0)[:, None]
    t = jnp.where(t <= 0, jnp.ones_like(t), t).astype(dtype)
    kept = jnp.take_along_axis(x, jnp.clip(KEPT, 0, V - 1), 1) / t[:, None]
    found = jax.nn.log_softmax(jnp.where(is_token, kept, -jnp.inf), axis=1)
    is_given = GIVEN[:, None] == KEPT
    first = jnp.take_along_axis(found, jnp.argmax(is_given, axis=1)[:, None], 1)[:, 0]
    given = jnp.where(is_given.any(axis=1), first, -jnp.inf)
    answers = jnp.where(valid & is_token, found, jnp.nan)
    return jnp.where(valid[:, 0] & (GIVEN < V), given, jnp.nan), answers


def test_kept_logprobs_and_their_gradients(monkeypatch):
    """Against float64, in blocks of five of 12 rows; rows without an answer have no derivative."""
    monkeypatch.setattr("pallas_kernels.linear.kept.BLOCK_BYTES", 5 * 8 * 32 * 4)

    def kept(arrays):
        out = linear_kept_logprobs(
            arrays["hidden"], arrays["head"], GIVEN, KEPT, bias=arrays["bias"], scale=0.5,
            soft_cap=5.0, temperatures=arrays["temperatures"][-N:],
        )  # fmt: skip
        return kept_loss(out.logprobs, out.kept_logprobs), out

    found, out = quick_compile.jit(jax.grad(kept, has_aux=True))(case())
    with jax.enable_x64(True):

        def of_plain(arrays):
            values = plain_kept(arrays, jnp.float64)
            return kept_loss(*values), values

        right, values = quick_compile.jit(jax.grad(of_plain, has_aux=True))(wide())
    for actual, value in zip(out, values, strict=True):
        np.testing.assert_allclose(actual, value, atol=1e-5)
    assert np.isneginf(out.logprobs[N - 3])
    assert np.isnan(out.logprobs[N - 2 :]).all()  # an id outside, a temperature below 0
    for name, gradient in right.items():
        np.testing.assert_allclose(found[name], gradient, 1e-5, 3e-5, err_msg=name)
