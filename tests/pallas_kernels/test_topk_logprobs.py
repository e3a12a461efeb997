"""`topk_logprobs` and `greedy` (XLA) against the float64 oracle: values, edges, calling styles."""

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
from pallas_kernels.testing.shapes import Shape
from tests.support import programs, quick_compile
from tests.support.interpreted_kernels import ON_GPU

DTYPES = ("float32", "bfloat16", "float16")
INF, NAN = np.inf, np.nan
choices = jax.jit(greedy)  # outside of jit, every call compiles
quickly = jax.jit if ON_GPU else quick_compile.jit


def random_logits(rng, rows, vocabulary, dtype="float32", levels=None):
    """Normal logits; few `levels` make many ties."""
    x = rng.normal(size=(rows, vocabulary)) * 4
    if levels is not None:
        x = np.round(x / 4 * levels) / levels
    return x.astype(jnp.dtype(dtype))


def both(logits, token_ids, k, **options):
    """The implementation's answer after comparing it with the oracle's."""
    token_ids = np.asarray(token_ids, np.int32)
    actual = programs.topk_logprobs(logits, token_ids, k, implementation="xla", **options)
    oracle.assert_matches(actual, oracle.topk_logprobs(logits, token_ids, k, **options))
    return actual


# Each vocabulary takes another path through selection or cuts.
SMALL = tuple(
    Shape(rows, vocabulary, k, dtype)
    for rows, vocabulary, k in (
        (1, 1, 1),
        (4, 5, 5),
        (24, 257, 20),
        (9, 1000, 0),
        (5, 4096, 20),
        (3, 50_257, 5),
        (2, 32_000, 128),
        (3, 600, 512),
        (2, 50_257, 512),
    )
    for dtype in ("float32", "bfloat16", "float16")
)


@pytest.mark.parametrize(
    "shape",
    # Each shape with one dtype, each dtype with two shapes or more; the rest: `.ci/heavy slow`.
    [
        pytest.param(shape, marks=() if i % 3 == i // 3 % 3 else pytest.mark.slow, id=str(shape))
        for i, shape in enumerate(SMALL)
    ],
)
def test_small_shapes(shape):
    rng = np.random.default_rng(shape.vocabulary)
    x = random_logits(rng, shape.rows, shape.vocabulary, shape.dtype)
    both(x, rng.integers(0, shape.vocabulary, shape.rows), shape.k)


class CallingStyles(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_every_argument(self):
        rng = np.random.default_rng(1)
        x = random_logits(rng, 6, 1500, levels=2)
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

        oracle.assert_matches(
            call(x, token_ids, options), oracle.topk_logprobs(x, token_ids, 7, **options)
        )

    @chex.variants(with_jit=True, without_jit=True)
    def test_greedy(self):
        x = np.array(
            [
                [1, 3, 3, 2],
                [NAN, -INF, -INF, NAN],
                [NAN, NAN, NAN, NAN],
                [-0.0, 0.0, -1, -1],
                [-INF, -INF, -INF, -INF],
                [NAN, 1, INF, INF],
                [-INF, 5, NAN, 5],
            ],
            np.float32,
        )
        choice = self.variant(greedy)(x)
        expected = [oracle.greedy_token_id(row) for row in x]
        assert expected == [1, 1, 0, 0, 0, 2, 1]  # by hand
        np.testing.assert_array_equal(choice.token_ids, expected)
        np.testing.assert_array_equal(choice.valid, [oracle.is_valid(row) for row in x])


@pytest.mark.fast
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [8, 5000])  # one stage, two stages
def test_edges(vocabulary, dtype):
    """Invalid rows, masked vocabularies and ids outside it; and their neighbors stay untouched."""
    rng = np.random.default_rng(2)
    normal = random_logits(rng, 1, vocabulary, dtype)[0]
    rows = {
        "normal": normal,
        "nan": np.where(np.arange(vocabulary) == 3, NAN, normal),
        "negative nan": np.where(np.arange(vocabulary) == 3, -NAN, normal),
        "plus inf": np.where(np.arange(vocabulary) == 2, INF, normal),
        "nothing finite": np.full(vocabulary, -INF),
        "nan and -inf": np.where(np.arange(vocabulary) == 7, NAN, -INF),
        "one finite": np.where(np.arange(vocabulary) == vocabulary - 1, 1.5, -INF),
        "three finite": np.where(np.arange(vocabulary) % (vocabulary // 3) == 0, normal, -INF),
        "all equal": np.full(vocabulary, 0.25),
        "zeros of both signs": np.where(np.arange(vocabulary) % 3 == 0, -0.0, 0.0),
        "normal again": normal,
    }
    x = np.stack([row.astype(jnp.dtype(dtype)) for row in rows.values()])
    for token in (0, 3, vocabulary - 1, vocabulary, -1):
        both(x, np.full(len(x), token), 6)
    out = both(x, np.full(len(x), 4), 6)
    names = list(rows)
    first, last = names.index("normal"), names.index("normal again")
    np.testing.assert_array_equal(out.token_ids[first], out.token_ids[last])
    np.testing.assert_allclose(out.logprobs[first], out.logprobs[last], rtol=1e-6)
    # Written out once, so that the oracle's reading of the contract is itself checked.
    for name in ("nan", "negative nan", "plus inf", "nothing finite", "nan and -inf"):
        row = names.index(name)
        assert out.token_ids[row].tolist() == [4, -1, -1, -1, -1, -1, -1]
        assert np.isnan(out.logprobs[row]).all()
        assert out.token_ranks[row] == 0
    zeros = names.index("zeros of both signs")
    assert out.token_ids[zeros].tolist() == [4, 0, 1, 2, 3, 4, 5]
    assert out.token_ranks[zeros] == 1
    one = names.index("one finite")
    assert out.token_ids[one].tolist() == [4, vocabulary - 1, -1, -1, -1, -1, -1]
    assert out.logprobs[one].tolist() == [-INF, 0, *[-INF] * 5]


# Every vocabulary, K and dtype, and few programs; the rest in `.ci/heavy slow`.
PROGRAMS = [
    (1, 0, "float32"),
    (5, 3, "bfloat16"),
    (300, 20, "float16"),
    (2000, 3, "float16"),
    (2000, 20, "float32"),
    (2000, 0, "bfloat16"),
]
EVERY_PROGRAM = [
    (vocabulary, k, dtype)
    for vocabulary in (1, 5, 300, 2000)
    for k in (0, 3, 20)
    for dtype in DTYPES
    if k <= vocabulary
]


@st.composite
def cases(draw, every):
    """Logits from few values, so that ties, edges and invalid rows are common."""
    vocabulary, k, dtype = draw(st.sampled_from(every))
    seed = draw(st.integers(0, 2**32 - 1))
    rows = 5
    rng = np.random.default_rng(seed)
    x = rng.choice(
        np.array(draw(st.sampled_from([[0.5, -0.0, 0.0, -2], [3, -3, -INF], [-INF, 1, 1e4]]))),
        size=(rows, vocabulary),
    )
    for value in draw(st.lists(st.sampled_from([NAN, -NAN, INF, -INF, 7.0]), max_size=6)):
        x[rng.integers(rows), rng.integers(vocabulary)] = value
    num_targets = 7
    return {
        "logits": x.astype(jnp.dtype(dtype)),
        "token_ids": rng.integers(-1, vocabulary + 1, num_targets).astype(np.int32),
        "k": k,
        "row_ids": rng.integers(-1, rows + 1, num_targets).astype(np.int32),
        "num_rows": np.int32(draw(st.integers(0, num_targets + 1))),
        "temperatures": rng.choice(np.array([0, 0.25, 1, 3], np.float32), num_targets),
        "extra_token_ids": rng.integers(-1, vocabulary + 1, (num_targets, 2)).astype(np.int32),
    }


@given(case=cases(PROGRAMS))
@settings(max_examples=20)  # twenty times as many: `.ci/heavy slow`
def test_any_values(case):
    check_case(case)


@pytest.mark.slow
@given(case=cases(EVERY_PROGRAM))
@settings(max_examples=400)
def test_any_values_of_every_program(case):
    check_case(case)


def check_case(case):
    actual = programs.topk_logprobs(**case)
    oracle.assert_matches(actual, oracle.topk_logprobs(**case))
    choice = choices(case["logits"])
    expected = [oracle.greedy_token_id(row) for row in case["logits"]]
    np.testing.assert_array_equal(choice.token_ids, expected)


@given(num_rows=st.integers(0, 40))
@settings(max_examples=10)
def test_blocks_follow_num_rows(num_rows):
    """Several blocks: rows from num_rows on are skipped, wherever the block boundary falls."""
    rng = np.random.default_rng(3)
    x = random_logits(rng, 40, 4096)
    assert 1 < rows.rows_on_cpu(jnp.asarray(x), 37, 3, True) < 37
    row_ids = rng.integers(0, 40, 37).astype(np.int32)
    both(x, rng.integers(0, 4096, 37), 3, row_ids=row_ids, num_rows=np.int32(num_rows))
    choice = choices(x)
    np.testing.assert_array_equal(choice.token_ids, x.argmax(axis=1))
    assert choice.valid.all()


@pytest.mark.parametrize("value", [-0.1, -5.0, -80.0])
def test_sums_of_many_equal_terms(value):
    """A float32 sum that grows term by term loses digits here: 131071 equal terms."""
    x = np.full((1, 131_072), value, np.float32)
    x[0, 77] = 0
    both(x, [5], 2)


@pytest.mark.fast
def test_inside_while_loop():
    """One token a turn, as a decoding loop does, with a row count that changes."""
    rng = np.random.default_rng(5)
    x = random_logits(rng, 40, 4096)
    token_ids = rng.integers(0, 4096, 40).astype(np.int32)

    @quickly
    def loop(x, token_ids):
        def turn(carry):
            turns, total = carry
            out = topk_logprobs(x, token_ids, 2, num_rows=turns * 10)
            return turns + 1, total + jnp.sum(out.token_ranks)

        return jax.lax.while_loop(lambda c: c[0] < 4, turn, (jnp.int32(0), jnp.int32(0)))

    ranks = oracle.topk_logprobs(x, token_ids, 2).token_ranks
    assert loop(x, token_ids)[1] == sum(int(ranks[: 10 * turns].sum()) for turns in range(4))


@pytest.mark.fast
@pytest.mark.parametrize("rows", [8, 160])  # one block per device, several
def test_under_shard_map(rows):
    """Rows sharded over four devices, each with its own row ids and row count."""
    rng = np.random.default_rng(6)
    x = random_logits(rng, rows, 4096)
    local = rows // 4
    token_ids = rng.integers(0, 4096, rows).astype(np.int32)
    row_ids = rng.integers(0, local, rows).astype(np.int32)
    num_rows = np.array([0, 1, local // 2, local], np.int32)
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    spec = jax.sharding.PartitionSpec("data")

    @quickly
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def sharded(x, token_ids, row_ids, num_rows):
        return topk_logprobs(x, token_ids, 5, row_ids=row_ids, num_rows=num_rows[0])

    choice = quickly(jax.shard_map(greedy, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    np.testing.assert_array_equal(choice.token_ids, [oracle.greedy_token_id(row) for row in x])
    actual = sharded(x, token_ids, row_ids, num_rows)
    for shard in range(4):
        part = slice(shard * local, (shard + 1) * local)
        expected = oracle.topk_logprobs(
            x[part], token_ids[part], 5, row_ids=row_ids[part], num_rows=num_rows[shard]
        )
        oracle.assert_matches(jax.tree.map(lambda a, p=part: a[p], actual), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spread", [1e-3, 3.0, 60.0, 6e4])
def test_the_error_bound_holds_for_every_dtype_and_spread(dtype, spread):
    """From nearly equal logits, where the sum decides, to logprobs of minus ten thousands."""
    rng = np.random.default_rng(8)
    x = np.clip(rng.normal(size=(4, 30_000)) * spread / 3, -6.5e4, 6.5e4).astype(jnp.dtype(dtype))
    token_ids = rng.integers(0, 30_000, 4).astype(np.int32)
    extra = rng.integers(0, 30_000, (4, 128)).astype(np.int32)
    found = programs.topk_logprobs(x, token_ids, 20, extra_token_ids=extra)
    oracle.assert_matches(found, oracle.topk_logprobs(x, token_ids, 20, extra_token_ids=extra))
    assert found.logprobs.dtype == jnp.float32
