"""Heads split over the vocabulary and hidden states over rows: one device's results, few words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from pallas_kernels import linear_kept_logprobs, linear_topk_logprobs
from pallas_kernels.linear import schedule as schedules
from tests.support.collectives import bytes_of_a_run, longest_axis
from tests.support.shards import P, users_mesh

N, V, H, K, C = 16, 512, 24, 5, 2
SPLITS = {"rows": ("data", None), "vocabulary": (None, "model"), "both": ("data", "model")}


@functools.cache
def case():
    rng = np.random.default_rng(0)
    return {
        "hidden": np.float32(rng.integers(-4, 5, (N, H))),  # exact products, and so exact ties
        "head": np.float32(rng.integers(-4, 5, (V, H))),
        "bias": np.float32(rng.integers(-4, 5, V)),
        "token_ids": np.int32(rng.integers(-1, V + 1, N)),
        "temperatures": np.float32(rng.uniform(2, 9, N)),
        "extra_token_ids": np.int32(rng.integers(-1, V + 1, (N, C))),
    }


def placed(kind, split):
    rows, vocabulary = SPLITS[split]
    specs = {"hidden": P(rows, None), "head": P(vocabulary, None)}
    mesh = users_mesh(kind)
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs[name])) if name in specs else x
        for name, x in case().items()
    }


def call(arrays, **options):
    return linear_topk_logprobs(
        **arrays, k=K, log_sum_exp=True, entropy=True, num_rows=N - 1, **options
    )


def gradient(arrays, **options):
    def loss(moving):
        out = call({**arrays, **moving}, **options)
        parts = (out.logprobs, out.extra_logprobs, out.entropy, out.log_sum_exp)
        return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0) ** 2) for x in parts)

    return jax.grad(loss)({name: arrays[name] for name in ("hidden", "head", "bias")})


@pytest.fixture
def in_columns(monkeypatch):
    """Each device takes its columns in parts."""
    monkeypatch.setattr(schedules, "FEW_BYTES", 0)
    monkeypatch.setattr(schedules, "NARROWEST", 64)


@pytest.mark.parametrize("kind", ["explicit", pytest.param("automatic", marks=pytest.mark.slow)])
def test_results_and_gradients_are_those_of_one_device(kind, in_columns):
    arrays = placed(kind, "both")
    rows, vocabulary = SPLITS["both"]
    named = {"mesh": users_mesh(kind), "axis_name": vocabulary, "row_axis_name": rows}
    options = named if kind == "automatic" else {}

    def both(arrays):
        return call(arrays, **options), gradient(arrays, **options)

    right, right_slopes = jax.jit(lambda arrays: (call(arrays), gradient(arrays)))(case())
    with jax.set_mesh(users_mesh(kind)):
        out, slopes = jax.jit(both)(arrays)
    for one, other in zip(out[:6], right[:6], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    for name, slope in slopes.items():
        np.testing.assert_allclose(slope, right_slopes[name], rtol=1e-4, atol=2e-3, err_msg=name)


def words(program):
    """Of 4 bytes, that a run carries where no rank is counted twice."""
    return bytes_of_a_run(program, branch=min) // 4


def test_what_travels(in_columns):
    """Forward R (4 + C + 2 K) words a shard and one, and R more with entropy; backward H R."""
    mesh = users_mesh("automatic")
    options = {"mesh": mesh, "axis_name": "model"}
    arrays = placed("automatic", "vocabulary")
    forward = jax.jit(lambda arrays: call(arrays, **options)).lower(arrays).compile()
    gathered = 4 * N * (3 + 2 * K + 1)
    assert words(forward) == gathered + N * (1 + C) + 1
    backward = jax.jit(lambda arrays: gradient(arrays, **options)).lower(arrays).compile()
    assert words(backward) == words(forward) + N * H
    assert longest_axis(forward) < V // 4  # nothing as long as a shard's columns travels


@pytest.mark.fast
def test_over_rows_the_heads_gradient_is_summed_once(in_columns):
    options = {"mesh": users_mesh("automatic"), "row_axis_name": "data"}
    arrays = placed("automatic", "rows")
    program = jax.jit(lambda arrays: gradient(arrays, **options)).lower(arrays).compile()
    assert words(program) == V * H + V


def test_inside_shard_map_with_padding(in_columns):
    """The head's last shard ends in rows of padding, which count for nothing."""
    arrays = dict(case())
    vocab = 500
    real = {**arrays, "head": arrays["head"][:vocab], "bias": arrays["bias"][:vocab]}
    right = jax.jit(call)(real)
    arrays["head"] = np.where(np.arange(V)[:, None] < vocab, arrays["head"], np.float32(np.nan))
    local = functools.partial(call, axis_name="model", vocab_size=vocab)
    specs = {name: P("model") if name in ("head", "bias") else P() for name in arrays}
    mapped = jax.shard_map(local, mesh=users_mesh("automatic"), in_specs=(specs,), out_specs=P())
    found = jax.jit(mapped)(arrays)
    for one, other in zip(found[:3], right[:3], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.fast
def test_kept_logprobs_of_a_split_head():
    arrays = placed("explicit", "both")
    kept = np.random.default_rng(1).permuted(np.tile(np.arange(V, dtype=np.int32), (N, 1)), axis=1)
    kept = kept[:, :7]
    kept[:, 3] = -1

    def of(hidden, head):
        out = linear_kept_logprobs(hidden, head, kept[:, 0], kept)
        return jnp.sum(out.logprobs), out

    run = jax.jit(jax.grad(of, (0, 1), has_aux=True))
    right = run(*(case()[name] for name in ("hidden", "head")))
    with jax.set_mesh(users_mesh("explicit")):
        found = run(arrays["hidden"], arrays["head"])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
