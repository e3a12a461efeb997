"""What one read gives beside logprobs, and changes of logits in it, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import greedy_topk_logprobs, topk_logprobs
from pallas_kernels.testing import oracle
from tests.support import programs, quick_compile, shape_checks
from tests.support.changed_logits import ALL, bits_of, changes_of, in_float64
from tests.support.interpreted_kernels import ON_GPU

INF, NAN = np.inf, np.nan
quickly = jax.jit if ON_GPU else quick_compile.jit

# Ranks in both ways, with and without each change; few programs.
PROGRAMS = [
    (37, 3, "float32", "strict", ("allowed", "bias")),
    (300, 20, "bfloat16", "inclusive", ("allowed",)),
    (2001, 5, "float16", "strict", ("bias",)),
    (2001, 0, "float32", "inclusive", ("allowed", "bias")),
]


@functools.cache
def program(k, rank_ties, greedy):
    options = {"rank_ties": rank_ties, **ALL}

    def separate(x, token_ids, arrays):
        return topk_logprobs(x, token_ids, k, **arrays, **options)

    def fused(x, arrays):
        return greedy_topk_logprobs(x, k, **arrays, **options)

    return quickly(fused if greedy else separate)


@st.composite
def cases(draw):
    """Few values, so that ties are common, with every kind of invalid row and change."""
    vocabulary, k, dtype, ties, changed = draw(st.sampled_from(PROGRAMS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = 4
    values = draw(st.sampled_from([[0.5, -0.0, 0.0, -2], [3, -3, -INF], [-INF, 1, 1e4]]))
    x = rng.choice(np.array(values), size=(rows, vocabulary))
    for value in draw(st.lists(st.sampled_from([NAN, -NAN, INF, 7.0]), max_size=3)):
        x[rng.integers(rows), rng.integers(vocabulary)] = value
    x = x.astype(jnp.dtype(dtype))
    token_ids = rng.integers(-1, vocabulary + 1, rows).astype(np.int32)
    arrays = {
        "temperatures": rng.choice(np.array([0, 0.25, 1, 3], np.float32), rows),
        "extra_token_ids": rng.integers(-1, vocabulary + 1, (rows, 2)).astype(np.int32),
        **changes_of(rng, rows, vocabulary, changed),
    }
    return x, token_ids, k, ties, arrays


@given(case=cases())
@settings(max_examples=25)  # more: `.ci/heavy slow`
def test_any_values(case):
    check(*case)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=500)
def test_many_values(case):
    check(*case)


def check(x, token_ids, k, ties, arrays):
    found = program(k, ties, False)(x, token_ids, arrays)
    oracle.assert_matches(found, oracle.topk_logprobs(x, token_ids, k, **arrays, rank_ties=ties))
    chosen = [oracle.greedy_token_id(row) for row in in_float64(x, arrays)]
    found = program(k, ties, True)(x, arrays)
    oracle.assert_matches(found, oracle.topk_logprobs(x, chosen, k, **arrays, rank_ties=ties))


@pytest.mark.fast
def test_by_hand():
    """T = 2 of the logits 2 log p, so of p; in vLLM's count two tokens are at least as large."""
    x = 2 * np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    found = programs.topk_logprobs(
        x, np.array([2], np.int32), 2, temperatures=np.array([2], np.float32),
        rank_ties="inclusive", **ALL,
    )  # fmt: skip
    assert found.token_ranks.tolist() == [3]
    np.testing.assert_allclose(found.log_sum_exp, [0], atol=1e-6)
    np.testing.assert_allclose(found.entropy, [1.5 * np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(found.top_logits, [[2 * np.log(0.5), 2 * np.log(0.25)]], rtol=1e-6)


@pytest.mark.fast
def test_changes_by_hand():
    """Forbidden whatever the bias; sums of duplicates; what makes a row invalid."""
    x = np.zeros((8, 40), np.float32)
    x[1, 5] = NAN
    x[7, 5] = INF
    ids = np.array([[5, 39, 5], [5, 0, -1], *[[5, 7, 40]] * 6], np.int32)
    bias = np.array(
        [[1, 3, 1], [1, 1, 9], [0, -INF, 9], [NAN, 0, 9], [INF, 0, 9], [NAN, 1, 9], [0, 0, NAN],
         [-2, 0, 9]], np.float32,
    )  # fmt: skip
    allowed = np.full((8, 2), 2**32 - 1, np.uint32)
    allowed[[1, 5, 7]] = bits_of([i for i in range(40) if i != 5], 40)
    allowed[6] = 0
    allowed[6, 1] = 1 << 8  # only id 40, which is none
    found = programs.topk_logprobs(
        x, np.full(8, 5, np.int32), 2, allowed=allowed, bias_token_ids=ids, bias=bias, **ALL
    )
    top = found.top_logits.tolist()
    assert found.token_ids[:, 1:].tolist() == [
        [39, 5], [0, 1], [0, 1], [-1, -1], [-1, -1], [7, 0], [-1, -1], [0, 1],
    ]  # fmt: skip
    assert (top[0], top[1], top[2], top[5]) == ([3, 2], [1, 0], [0, 0], [1, 0])
    assert found.token_ranks.tolist() == [2, 40, 1, 0, 0, 40, 0, 40]
    assert np.isnan(found.entropy).tolist() == [False] * 3 + [True] * 2 + [False, True, False]
    assert found.logprobs[7, 0] == -INF
    # A bfloat16 logit and a bias are not rounded back.
    one = programs.topk_logprobs(
        x[:1].astype(jnp.bfloat16) + 1, ids[0, :1], 1, bias_token_ids=ids[:1, :1],
        bias=np.array([[2**-10]], np.float32), top_logits=True,
    )  # fmt: skip
    assert one.top_logits.tolist() == [[1 + 2**-10]]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_asking_for_more_changes_no_bit(dtype):
    """And a mask that allows all, and biases of nothing, change none either."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5, 5000)) * 4).astype(jnp.dtype(dtype))
    token_ids = np.arange(5, dtype=np.int32)
    plain = programs.topk_logprobs(x, token_ids, 5)
    assert (plain.log_sum_exp, plain.entropy, plain.top_logits) == (None, None, None)
    everything = np.full((5, -(-5000 // 32)), -1, np.int32)
    for options in (
        ALL,
        {"allowed": everything},
        {"bias_token_ids": np.full((5, 2), -1, np.int32), "bias": np.full((5, 2), NAN, "f4")},
    ):
        found = programs.topk_logprobs(x, token_ids, 5, **options)
        for name in ("token_ids", "logprobs", "token_ranks", "extra_logprobs"):
            np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))


@pytest.mark.parametrize("spread", [1e-3, 1.0, 8.0, 300.0])
def test_error_bounds(spread):
    """Of log-sum-exp and entropy, from a uniform row to one token with all of the probability."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(3, 60_001)) * spread).astype(np.float32)
    x[2] = np.where(np.arange(60_001) % 2, -spread, 0)  # equal terms, whose roundings are too
    ids = np.zeros(3, np.int32)
    oracle.assert_matches(programs.topk_logprobs(x, ids, 1, **ALL), oracle.topk_logprobs(x, ids, 1))


@pytest.mark.slow
def test_the_bound_can_fail():
    """Negative control: an entropy in bits, or of the other temperature."""
    x = np.random.default_rng(2).normal(size=(1, 50)).astype(np.float32)
    ids = np.zeros(1, np.int32)
    expected = oracle.topk_logprobs(x, ids, 1)
    found = programs.topk_logprobs(x, ids, 1, temperatures=np.array([0.9], np.float32), **ALL)
    for wrong in (found.entropy, (expected.entropy / np.log(2)).astype(np.float32)):
        with pytest.raises(AssertionError):
            oracle.assert_entropies_close(wrong, expected.entropy)


def test_what_does_not_fit_is_refused():
    x, ids = np.zeros((2, 70), np.float32), np.zeros(2, np.int32)
    call = functools.partial(shape_checks.as_users_run(topk_logprobs), x, ids, 1)
    words = np.zeros((2, 3), np.uint32)
    with pytest.raises(ValueError, match=r"allowed has shape \[2, 2\]; it must be \[2, 3\]"):
        call(allowed=words[:, :2])
    with pytest.raises(TypeError, match="allowed has dtype bool; it must be uint32"):
        call(allowed=words.astype(bool))
    with pytest.raises(TypeError, match="bias is None; pass both"):
        call(bias_token_ids=np.zeros((2, 1), np.int32))
    with pytest.raises(ValueError, match=r"bias has shape \[2, 2\]; it must be \[2, 1\]"):
        call(bias_token_ids=np.zeros((2, 1), np.int32), bias=np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="names 4097 ids for each row; the limit is 4096"):
        call(bias_token_ids=np.zeros((2, 4097), np.int32), bias=np.zeros((2, 4097), np.float32))
    with pytest.raises(ValueError, match="rank_ties = 'worst' is not known; choose one"):
        call(rank_ties="worst")
