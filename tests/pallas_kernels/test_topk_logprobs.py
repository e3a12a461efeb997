"""`topk_logprobs` and `greedy` (XLA) against the float64 oracle: values, edges, styles.

Rows of a few logits, whose answers are checked on paper.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import greedy, topk_logprobs
from pallas_kernels.backends.xla import rows
from pallas_kernels.testing import oracle
from tests.support import programs, quick_compile
from tests.support.changed_logits import ALL, changes_of, in_float64

INF, NAN = np.inf, np.nan
choices = jax.jit(greedy)  # outside of jit, every call compiles
quickly = jax.jit if jax.default_backend() == "gpu" else quick_compile.jit


def both(logits, token_ids, k, **options):
    """The implementation's answer after comparing it with the oracle's."""
    token_ids = np.asarray(token_ids, np.int32)
    actual = programs.topk_logprobs(logits, token_ids, k, implementation="xla", **options)
    oracle.assert_matches(actual, oracle.topk_logprobs(logits, token_ids, k, **options))
    return actual


def rows_of_every_kind(rng, vocabulary, dtype):
    """Two batches of rows [6, V]; one row with many large logits sends its batch another way.

    The first has ties, a masked row, neighbors, and logits that agree in their first halves. The
    second has rows of any logits, rows of near pairs, and a masked one.
    """
    masked = np.full(vocabulary, -INF)
    places = rng.choice(vocabulary, min(60, vocabulary // 2 + 1), replace=False)
    masked[places] = rng.normal(size=len(places))
    normal = rng.normal(size=(2, vocabulary)) * 4
    halves, near = np.arange(vocabulary, 0, -1) % 2**15, 8 + 2.0**-20 * rng.permutation(vocabulary)
    ties = rng.integers(-3, 3, vocabulary) * 0.5
    many = [normal[0], ties, np.zeros(vocabulary), masked, halves, near]
    pairs = np.repeat(rng.normal(size=(3, vocabulary)) * 4, 2, axis=1).astype(np.float32)
    pairs[:, 1::2] = np.nextafter(pairs[:, 1::2], np.float32(INF))
    few = [*normal, *rng.permuted(pairs[:, :vocabulary], axis=1), masked]
    return [np.stack(rows).astype(jnp.dtype(dtype)) for rows in (many, few)]


# Each vocabulary takes another path through selection or cuts, and so do three rows.
@pytest.mark.parametrize(
    ("rows", "vocabulary", "k", "dtype"),
    [
        (6, 1, 1, "float32"), (6, 5, 5, "bfloat16"), (3, 50_257, 5, "float16"),
        (6, 4001, 48, "float32"), (6, 50_257, 512, "float16"), (6, 32_000, 128, "float32"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (
            (6, 257, 20, "float16"), (6, 1000, 0, "float32"), (6, 4096, 20, "bfloat16"),
            (6, 4001, 48, "bfloat16"), (3, 600, 512, "bfloat16"),
        )),
    ],
)  # fmt: skip
def test_small_shapes(rows, vocabulary, k, dtype):
    rng = np.random.default_rng(vocabulary)
    for x in rows_of_every_kind(rng, vocabulary, dtype):
        both(x[-rows:], rng.integers(0, vocabulary, rows), k)


class CallingStyles(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_every_argument(self):
        rng = np.random.default_rng(1)
        x = np.round(rng.normal(size=(6, 1500)) * 2).astype(np.float32) / 2  # many ties
        token_ids = rng.integers(0, 1500, 9).astype(np.int32)
        options = {
            "row_ids": np.array([5, 0, 0, 3, -1, 6, 2, 2, 1], np.int32),
            "num_rows": np.int32(8),
            "temperatures": np.array([0, 1, 0.3, 2, 1, 1, 0.7, 1, 1], np.float32),
            "extra_token_ids": rng.integers(-1, 1501, (9, 4)).astype(np.int32),
        }

        @self.variant
        def call(x, token_ids, options):
            return topk_logprobs(x, token_ids, 7, **options)

        expected = oracle.topk_logprobs(x, token_ids, 7, **options)
        oracle.assert_matches(call(x, token_ids, options), expected)

    @chex.variants(with_jit=True, without_jit=True)
    def test_greedy(self):
        x = np.float32([
            [1, 3, 3, 2], [NAN, -INF, -INF, NAN], [NAN, NAN, NAN, NAN], [-0.0, 0.0, -1, -1],
            [-INF, -INF, -INF, -INF], [NAN, 1, INF, INF], [-INF, 5, NAN, 5],
        ])  # fmt: skip
        choice = self.variant(greedy)(x)
        expected = [oracle.greedy_token_id(row) for row in x]
        assert expected == [1, 1, 0, 0, 0, 2, 1]  # by hand
        np.testing.assert_array_equal(choice.token_ids, expected)
        np.testing.assert_array_equal(choice.valid, [oracle.is_valid(row) for row in x])


@pytest.mark.fast
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("vocabulary", "k"), [(304, 20), (5000, 6)])  # one stage, two stages
def test_edges(vocabulary, k, dtype):
    """Invalid rows, masked vocabularies and ids outside it; and their neighbors stay untouched."""
    edges = oracle.edge_rows(vocabulary, "float64", 8)
    three = np.where(np.arange(vocabulary) % (vocabulary // 3) == 0, edges[0], -INF)
    x = np.stack([*edges, three, np.full(vocabulary, 0.25), edges[0]]).astype(jnp.dtype(dtype))
    for token in (0, 3, 4, vocabulary - 1, vocabulary, -1):
        both(x, np.full(len(x), token), k)


# Ranks in both ways, with and without each change; few programs.
PROGRAMS = [
    (1, 0, "float32", "strict", ()),
    (5, 3, "bfloat16", "inclusive", ("allowed", "bias")),
    (300, 20, "float16", "strict", ()),
    (300, 20, "bfloat16", "inclusive", ("allowed",)),
    (2001, 5, "float16", "strict", ("bias",)),
    (2001, 20, "float32", "strict", ()),
    (2001, 0, "float32", "inclusive", ("allowed", "bias")),
]
NUM_ROWS, TARGETS = 5, 7


@st.composite
def cases(draw):
    """Few values, so that ties, edges and invalid rows are common; every kind of change."""
    vocabulary, k, dtype, ties, changed = draw(st.sampled_from(PROGRAMS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = draw(st.sampled_from([[0.5, -0.0, 0.0, -2], [3, -3, -INF], [-INF, 1, 1e4]]))
    x = rng.choice(np.array(values), size=(NUM_ROWS, vocabulary))
    for value in draw(st.lists(st.sampled_from([NAN, -NAN, INF, -INF, 7.0]), max_size=6)):
        x[rng.integers(NUM_ROWS), rng.integers(vocabulary)] = value
    arrays = {
        "temperatures": rng.choice(np.array([0, 0.25, 1, 3], np.float32), TARGETS),
        "extra_token_ids": rng.integers(-1, vocabulary + 1, (TARGETS, 2)).astype(np.int32),
        **changes_of(rng, TARGETS, vocabulary, changed),
    }
    targets = {
        "token_ids": rng.integers(-1, vocabulary + 1, TARGETS).astype(np.int32),
        "row_ids": rng.integers(-1, NUM_ROWS + 1, TARGETS).astype(np.int32),
        "num_rows": np.int32(draw(st.integers(0, TARGETS + 1))),
    }
    return x.astype(jnp.dtype(dtype)), targets, arrays, {"k": k, "rank_ties": ties}


@functools.cache
def program(call, k, rank_ties):
    return quickly(functools.partial(call, k=k, rank_ties=rank_ties, **ALL))


@given(case=cases())
@settings(max_examples=40)
def test_any_values(case):
    x, targets, arrays, options = case
    found = program(topk_logprobs, **options)(x, **targets, **arrays)
    oracle.assert_matches(found, oracle.topk_logprobs(x, **targets, **arrays, **options))
    own = {name: part[:NUM_ROWS] for name, part in arrays.items()}
    chosen = np.int32([oracle.greedy_token_id(row) for row in in_float64(x, own)])
    found = program(topk_logprobs, **options)(x, chosen, **own)
    oracle.assert_matches(found, oracle.topk_logprobs(x, chosen, **own, **options))
    expected = [oracle.greedy_token_id(row) for row in x]
    np.testing.assert_array_equal(choices(x).token_ids, expected)


@given(num_rows=st.integers(0, 40))
@settings(max_examples=10)
def test_blocks_follow_num_rows(num_rows):
    """Several blocks: rows from num_rows on are skipped, wherever the block boundary falls."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 4096)).astype(np.float32)
    assert 1 < rows.rows_on_cpu(jnp.asarray(x), 37, 3, True) < 37
    row_ids = rng.integers(0, 40, 37).astype(np.int32)
    both(x, rng.integers(0, 4096, 37), 3, row_ids=row_ids, num_rows=np.int32(num_rows))
    choice = choices(x)
    np.testing.assert_array_equal(choice.token_ids, x.argmax(axis=1))
    assert choice.valid.all()


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("spread", [1e-3, 3.0, 60.0, 6e4])
def test_the_error_bound_holds_for_every_dtype_and_spread(dtype, spread):
    """From nearly equal logits, where the sum decides, to logprobs of minus ten thousands.

    Log-sum-exp and entropy too; and of many equal terms, which a sum term by term would lose.
    """
    rng = np.random.default_rng(8)
    x = np.clip(rng.normal(size=(4, 30_000)) * spread / 3, -6.5e4, 6.5e4)
    x[3] = np.where(np.arange(30_000) == 77, 0, -min(spread, 8))
    x = x.astype(jnp.dtype(dtype))
    token_ids = rng.integers(0, 30_000, 4).astype(np.int32)
    extra = rng.integers(0, 30_000, (4, 128)).astype(np.int32)
    found = programs.topk_logprobs(x, token_ids, 20, extra_token_ids=extra, **ALL)
    oracle.assert_matches(found, oracle.topk_logprobs(x, token_ids, 20, extra_token_ids=extra))
    assert found.logprobs.dtype == jnp.float32


@pytest.mark.fast
def test_by_hand():
    """T = 2 of the logits 2 log p, so of p; in vLLM's count two tokens are at least as large."""
    x = 2 * np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    found = programs.topk_logprobs(
        x, np.array([2], np.int32), 2, temperatures=np.array([2], np.float32),
        rank_ties="inclusive", **ALL,
    )  # fmt: skip
    assert (found.token_ids.tolist(), found.token_ranks.tolist()) == ([[2, 1, 0]], [3])
    np.testing.assert_allclose(found.logprobs, np.log([[0.25, 0.5, 0.25]]), atol=1e-6)
    np.testing.assert_allclose(found.log_sum_exp, [0], atol=1e-6)
    np.testing.assert_allclose(found.entropy, [1.5 * np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(found.top_logits, [[2 * np.log(0.5), 2 * np.log(0.25)]], rtol=1e-6)


def test_asking_for_more_changes_no_bit():
    """And a mask that allows all, and biases of nothing, change none either."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5, 5000)) * 4).astype(jnp.bfloat16)
    token_ids = np.arange(5, dtype=np.int32)
    plain = programs.topk_logprobs(x, token_ids, 5)
    assert (plain.log_sum_exp, plain.entropy, plain.top_logits) == (None, None, None)
    everything = np.full((5, -(-5000 // 32)), -1, np.int32)
    no_bias = {"bias_token_ids": np.full((5, 2), -1, np.int32), "bias": np.full((5, 2), NAN, "f4")}
    found = programs.topk_logprobs(x, token_ids, 5, allowed=everything, **no_bias, **ALL)
    for name in ("token_ids", "logprobs", "token_ranks", "extra_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))


@pytest.mark.fast
def test_the_raw_logits_decide_where_scaled_ones_are_equal():
    """So hot that they are in float32; -0.0 and 0.0 are equal too, and the lower id comes first."""
    x = np.float32([[1, 1 + 2**-20, 1, -0.0, 0.0]])
    out = programs.topk_logprobs(x, np.array([0], np.int32), 5, temperatures=np.float32([1e9]))
    assert (out.token_ids.tolist(), out.token_ranks.tolist()) == ([[0, 1, 0, 2, 3, 4]], [2])
    assert len(set(out.logprobs[0, :4].tolist())) == 1


@pytest.mark.fast
def test_logits_of_any_size():
    """Large logits, and a spread that leaves float32's range only at the end."""
    x = np.array([[3e38, -3e38, 0, 3e38], [1e-40, 0, -1e-40, 2e-40]], np.float32)
    out = programs.topk_logprobs(x, np.array([0, 3], np.int32), 2)
    assert out.token_ids.tolist()[0] == [0, 0, 3]
    np.testing.assert_allclose(out.logprobs[0], [-np.log(2)] * 3, rtol=1e-6)
    np.testing.assert_allclose(out.logprobs[1], [-np.log(4)] * 3, rtol=1e-6)


@pytest.mark.fast
def test_no_rows():
    out = programs.topk_logprobs(np.zeros((0, 9), np.float32), np.zeros(0, np.int32), 3)
    assert [x.shape for x in out if x is not None] == [(0, 4), (0, 4), (0,), (0, 0)]
    assert programs.greedy(np.zeros((0, 9), np.float32)).token_ids.shape == (0,)
    nothing, ids = np.zeros((0, 9), np.float32), np.zeros(2, np.int32)
    lost = programs.topk_logprobs(nothing, ids, 1, row_ids=ids)
    assert lost.token_ids.tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.fast
def test_bad_temperatures_give_nan():
    x, t = np.arange(12, dtype=np.float32).reshape(4, 3), np.float32([-1, INF, NAN, 1])
    out = programs.topk_logprobs(x, np.zeros(4, np.int32), 1, temperatures=t)
    np.testing.assert_array_equal(np.isnan(out.logprobs[:, 0]), [True, True, True, False])
    assert out.token_ids[:, 1].tolist() == [2, 2, 2, 2]
