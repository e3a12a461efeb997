"""`topk_logprobs` and `greedy` (XLA) against the float64 oracle: values, edges, calling styles."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import blocks, greedy, greedy_token_ids, oracle, shapes, topk_logprobs
from tests.support import shape_checks

DTYPES = ("float32", "bfloat16", "float16")
INF, NAN = np.inf, np.nan


def random_logits(rng, rows, vocabulary, dtype="float32", levels=None):
    """Normal logits; few `levels` make many ties."""
    x = rng.normal(size=(rows, vocabulary)) * 4
    if levels is not None:
        x = np.round(x / 4 * levels) / levels
    return x.astype(jnp.dtype(dtype))


def both(logits, token_ids, k, **options):
    """The implementation's answer after comparing it with the oracle's."""
    actual = topk_logprobs(
        jnp.asarray(logits), jnp.asarray(token_ids, jnp.int32), k, implementation="xla", **options
    )
    oracle.assert_matches(actual, oracle.topk_logprobs(logits, token_ids, k, **options))
    return actual


@pytest.mark.parametrize("shape", shapes.SMALL, ids=str)
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
        np.testing.assert_array_equal(greedy_token_ids(x), expected)


@pytest.mark.fast
def test_by_hand():
    """A row small enough to check on paper: ln(1 + 2 + 4 + 1) = ln 8."""
    x = np.log(np.array([[1, 2, 4, 1]], np.float32))
    out = topk_logprobs(x, np.array([1], np.int32), 4)
    np.testing.assert_array_equal(out.token_ids, [[1, 2, 1, 0, 3]])
    np.testing.assert_allclose(out.logprobs, np.log([[2, 4, 2, 1, 1]]) - np.log(8), atol=1e-6)
    assert out.token_ranks.tolist() == [2]
    assert out.extra_logprobs.shape == (1, 0)


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


@st.composite
def cases(draw):
    """Logits from few values, so that ties, edges and invalid rows are common."""
    vocabulary = draw(st.sampled_from([1, 5, 300, 2000]))
    k = draw(st.sampled_from([k for k in (0, 3, 20) if k <= vocabulary]))
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
        "logits": x.astype(jnp.dtype(draw(st.sampled_from(DTYPES)))),
        "token_ids": rng.integers(-1, vocabulary + 1, num_targets).astype(np.int32),
        "k": k,
        "row_ids": rng.integers(-1, rows + 1, num_targets).astype(np.int32),
        "num_rows": np.int32(draw(st.integers(0, num_targets + 1))),
        "temperatures": rng.choice(np.array([0, 0.25, 1, 3], np.float32), num_targets),
        "extra_token_ids": rng.integers(-1, vocabulary + 1, (num_targets, 2)).astype(np.int32),
    }


@given(case=cases())
@settings(max_examples=40)
def test_any_values(case):
    actual = topk_logprobs(**case)
    oracle.assert_matches(actual, oracle.topk_logprobs(**case))
    choice = greedy(case["logits"])
    expected = [oracle.greedy_token_id(row) for row in case["logits"]]
    np.testing.assert_array_equal(choice.token_ids, expected)


@given(num_rows=st.integers(0, 40))
@settings(max_examples=10)
def test_blocks_follow_num_rows(num_rows):
    """Several blocks: rows from num_rows on are skipped, wherever the block boundary falls."""
    rng = np.random.default_rng(3)
    x = random_logits(rng, 40, 4096)
    assert 1 < blocks.block_rows(jnp.asarray(x), 37) < 37
    row_ids = rng.integers(0, 40, 37).astype(np.int32)
    both(x, rng.integers(0, 4096, 37), 3, row_ids=row_ids, num_rows=np.int32(num_rows))
    choice = greedy(jnp.asarray(x))
    np.testing.assert_array_equal(choice.token_ids, x.argmax(axis=1))
    assert choice.valid.all()


@pytest.mark.parametrize("value", [-0.1, -5.0, -80.0])
def test_sums_of_many_equal_terms(value):
    """A float32 sum that grows term by term loses digits here: 131071 equal terms."""
    x = np.full((1, 131_072), value, np.float32)
    x[0, 77] = 0
    both(x, [5], 2)


def test_logits_of_any_size():
    """Large logits, and a spread that leaves float32's range only at the end."""
    x = np.array([[3e38, -3e38, 0, 3e38], [1e-40, 0, -1e-40, 2e-40]], np.float32)
    out = topk_logprobs(x, np.array([0, 3], np.int32), 2)
    assert out.token_ids.tolist()[0] == [0, 0, 3]
    np.testing.assert_allclose(out.logprobs[0], [-np.log(2)] * 3, rtol=1e-6)
    np.testing.assert_allclose(out.logprobs[1], [-np.log(4)] * 3, rtol=1e-6)


def test_oracle_comparison_can_fail():
    """Negative control: a wrong id, rank, logprob or NaN is noticed."""
    x = random_logits(np.random.default_rng(4), 3, 50)
    token_ids = np.array([1, 2, 3], np.int32)
    good = topk_logprobs(x, token_ids, 4)
    expected = oracle.topk_logprobs(x, token_ids, 4)
    oracle.assert_matches(good, expected)
    for bad in (
        good._replace(token_ids=good.token_ids.at[1, 2].add(1)),
        good._replace(token_ranks=good.token_ranks.at[0].add(1)),
        good._replace(logprobs=good.logprobs.at[2, 1].add(3e-5)),
        good._replace(logprobs=good.logprobs.at[2, 1].set(jnp.nan)),
        good._replace(logprobs=good.logprobs.at[2, 1].set(-jnp.inf)),
        good._replace(logprobs=good.logprobs.astype(jnp.bfloat16)),
    ):
        with pytest.raises(AssertionError):
            oracle.assert_matches(bad, expected)


@pytest.mark.fast
def test_inside_while_loop():
    """One token a turn, as a decoding loop does, with a row count that changes."""
    rng = np.random.default_rng(5)
    x = random_logits(rng, 40, 4096)
    token_ids = rng.integers(0, 4096, 40).astype(np.int32)

    @jax.jit
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

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def sharded(x, token_ids, row_ids, num_rows):
        return topk_logprobs(x, token_ids, 5, row_ids=row_ids, num_rows=num_rows[0])

    choice = jax.jit(jax.shard_map(greedy, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    np.testing.assert_array_equal(choice.token_ids, [oracle.greedy_token_id(row) for row in x])
    actual = sharded(x, token_ids, row_ids, num_rows)
    for shard in range(4):
        part = slice(shard * local, (shard + 1) * local)
        expected = oracle.topk_logprobs(
            x[part], token_ids[part], 5, row_ids=row_ids[part], num_rows=num_rows[shard]
        )
        oracle.assert_matches(jax.tree.map(lambda a, p=part: a[p], actual), expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", shapes.MEMORY, ids=str)
def test_temporaries_are_a_share_of_the_logits(shape, dynamic):
    """At most 25 % of the logits' bytes, with row_ids and a dynamic row count too."""
    logits = jax.ShapeDtypeStruct((shape.rows, shape.vocabulary), shape.dtype)
    ids = jax.ShapeDtypeStruct((shape.rows,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)

    def call(logits, token_ids, row_ids, num_rows):
        if not dynamic:
            return topk_logprobs(logits, token_ids, shape.k, implementation="xla")
        return topk_logprobs(
            logits,
            token_ids,
            shape.k,
            row_ids=row_ids,
            num_rows=num_rows,
            extra_token_ids=row_ids[:, None],
            implementation="xla",
        )

    compiled = jax.jit(call).lower(logits, ids, ids, count).compile()
    size = shape.rows * shape.vocabulary * logits.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.25 * size


@pytest.mark.parametrize("shape", shapes.MEMORY[:4], ids=str)
def test_greedy_temporaries(shape):
    logits = jax.ShapeDtypeStruct((shape.rows, shape.vocabulary), shape.dtype)
    compiled = jax.jit(greedy).lower(logits).compile()
    size = shape.rows * shape.vocabulary * logits.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.25 * size


def test_memory_check_can_fail():
    """Negative control: log_softmax of all rows does show up as temporaries."""
    logits = jax.ShapeDtypeStruct((64, 32_000), jnp.bfloat16)

    def materialize(x):
        return jax.lax.top_k(jax.nn.log_softmax(x.astype(jnp.float32)), 20)

    compiled = jax.jit(materialize).lower(logits).compile()
    assert compiled.memory_analysis().temp_size_in_bytes > 0.25 * logits.size * 2


GOOD = {
    "logits": np.zeros((3, 10), np.float32),
    "token_ids": np.zeros(3, np.int32),
    "k": 2,
}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": np.zeros((3, 10), np.float64)}, TypeError, "64-bit"),
        ({"logits": np.zeros((3, 10), np.int32)}, TypeError, "int32"),
        ({"logits": np.zeros((10,), np.float32)}, ValueError, r"\[N, V\]"),
        ({"logits": np.zeros((3, 0), np.float32)}, ValueError, "empty vocabulary"),
        ({"logits": [[1.0]]}, TypeError, "list"),
        ({"token_ids": np.zeros(3, np.int64)}, TypeError, "64-bit"),
        ({"token_ids": np.zeros(3, np.int16)}, TypeError, "int16"),
        ({"token_ids": np.zeros((3, 1), np.int32)}, ValueError, "token_ids has shape"),
        ({"token_ids": np.zeros(4, np.int32)}, ValueError, "pass row_ids"),
        ({"k": -1}, ValueError, "k = -1"),
        ({"k": 11}, ValueError, "outside 0 .. 10"),
        ({"k": 129, "logits": np.zeros((3, 200), np.float32)}, ValueError, "outside 0 .. 128"),
        ({"k": 1.0}, TypeError, "Python int"),
        ({"k": True}, TypeError, "Python int"),
        ({"row_ids": np.zeros(4, np.int32)}, ValueError, "row_ids has shape"),
        ({"num_rows": -1}, ValueError, "num_rows = -1 is outside 0 .. 2147483647"),
        ({"num_rows": 2**31}, ValueError, "num_rows = 2147483648 is outside"),
        ({"num_rows": np.zeros(1, np.int32)}, ValueError, "num_rows has shape"),
        ({"temperatures": np.zeros(2, np.float32)}, ValueError, "temperatures has shape"),
        ({"temperatures": np.zeros(3, np.float16)}, TypeError, "float16"),
        ({"extra_token_ids": np.zeros(3, np.int32)}, ValueError, "extra_token_ids has shape"),
        ({"extra_token_ids": np.zeros((3, 129), np.int32)}, ValueError, "limit is 128"),
        ({"implementation": "triton"}, ValueError, "'triton' is not known"),
    ],
)
def test_refused(change, error, words):
    call = shape_checks.as_users_run(topk_logprobs)
    call(**GOOD)
    with pytest.raises(error, match=words):
        call(**(GOOD | change))


def test_a_vocabulary_whose_ranks_float32_cannot_count_is_refused():
    """Only traced: nobody has the memory for it."""
    tokens = jax.ShapeDtypeStruct((1,), np.int32)

    def shape(vocabulary):
        logits = jax.ShapeDtypeStruct((1, vocabulary), np.float32)
        return jax.eval_shape(lambda x, t: topk_logprobs(x, t, 1).token_ranks, logits, tokens).shape

    assert shape(2**24) == (1,)
    with pytest.raises(ValueError, match="16777217 columns; the limit is 16777216 on a device"):
        shape(2**24 + 1)


def test_k_must_be_static():
    with pytest.raises(TypeError, match="Python int"):
        jax.jit(lambda k: topk_logprobs(GOOD["logits"], GOOD["token_ids"], k))(2)


def test_no_rows():
    out = topk_logprobs(np.zeros((0, 9), np.float32), np.zeros(0, np.int32), 3)
    assert [x.shape for x in out] == [(0, 4), (0, 4), (0,), (0, 0)]
    assert greedy(np.zeros((0, 9), np.float32)).token_ids.shape == (0,)
    lost = topk_logprobs(
        np.zeros((0, 9), np.float32), np.zeros(2, np.int32), 1, row_ids=np.zeros(2, np.int32)
    )
    assert lost.token_ids.tolist() == [[-1, -1], [-1, -1]]


def test_bad_temperatures_give_nan():
    out = topk_logprobs(
        np.arange(12, dtype=np.float32).reshape(4, 3),
        np.zeros(4, np.int32),
        1,
        temperatures=np.array([-1, INF, NAN, 1], np.float32),
    )
    np.testing.assert_array_equal(np.isnan(out.logprobs[:, 0]), [True, True, True, False])
    assert out.token_ids[:, 1].tolist() == [2, 2, 2, 2]
