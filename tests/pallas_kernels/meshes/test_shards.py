"""`topk_logprobs` on vocabulary shards: the results of one device, and what travels for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from pallas_kernels import greedy_topk_logprobs, topk_logprobs
from pallas_kernels.lowering import choose
from pallas_kernels.testing import oracle
from tests.support import programs, quick_compile
from tests.support.changed_logits import ALL, bits_of, changes_of, in_float64
from tests.support.collectives import collectives
from tests.support.shards import P, mesh_of, on_shards, padded

V, K = 301, 64  # more columns wanted than a shard has
CASES = [
    pytest.param(2, "float32", "strict", marks=pytest.mark.slow),
    (8, "float32", "strict"),
    pytest.param(3, "bfloat16", "inclusive", marks=pytest.mark.fast),
]


def edge_rows(vocab, dtype):
    """Ties over shards, masked shards, every kind of invalid row, and ordinary ones."""
    rng = np.random.default_rng(vocab)
    x = np.round(rng.normal(0, 4, (14, vocab)), 1)
    x[1] = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    x[2] = -np.inf
    x[2, vocab - 1] = -3.0  # one shard alone has something
    x[3, vocab // 2] = np.nan
    x[4, 0] = np.inf
    x[5] = -np.inf
    x[6] = -np.inf
    x[6, 1] = -np.nan  # a shard of -inf and NaN alone
    x[7] = np.nan
    x[8, ::7] = 9.0
    x[9] *= 1e3 if dtype == "float16" else 1e30
    x[10, : vocab // 2] = -np.inf
    return x.astype(jnp.dtype(dtype))


def arguments(vocab, rows):
    """Rows out of order and skipped, ids of every shard and outside, temperatures of every kind."""
    rng = np.random.default_rng(1)
    row_ids = np.concatenate([np.arange(rows), [3, -1, rows, 0, 0, 5]]).astype(np.int32)
    count = len(row_ids)
    token_ids = rng.integers(0, vocab, count).astype(np.int32)
    token_ids[:4] = [vocab - 1, vocab, -1, 0]
    extra = rng.integers(-1, vocab + 1, (count, 3)).astype(np.int32)
    temperatures = rng.choice(np.array([1, 0.3, 0, 7, -1], np.float32), count)
    return token_ids, row_ids, np.int32(count - 2), temperatures, extra


def assert_same(actual, expected):
    """Ids and ranks to the bit, logprobs within the bound of the contract twice."""
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    np.testing.assert_array_equal(actual.token_ranks, expected.token_ranks)
    for a, b in zip(
        (actual.logprobs, actual.extra_logprobs),
        (expected.logprobs, expected.extra_logprobs),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=4e-7, atol=2e-5, equal_nan=True)


@functools.cache
def inputs(dtype):
    """Rows, and what a call takes of them, with masks that begin inside of shards and biases."""
    x = edge_rows(V, dtype)
    names = "token_ids", "row_ids", "num_rows", "temperatures", "extra_token_ids"
    given = dict(zip(names, arguments(V, len(x)), strict=True))
    changes = changes_of(np.random.default_rng(0), len(given["token_ids"]), V)
    changes["allowed"][0] = bits_of([V - 1], V)  # one shard alone has a token
    changes["allowed"][8:] = np.uint32(2**32 - 1)
    changes["bias_token_ids"][8, :3] = [0, V - 1, -1]  # a tie of the first and the last id
    changes["bias"][8, :2] = [50 - x[8, 0], 50 - x[8, V - 1]]
    return x, given, changes


@functools.cache
def program(dtype, ties):
    """call(columns of x, shard) with every option, of given tokens and of the greedy ones."""
    x, given, changes = inputs(dtype)
    own = {name: part[: len(x)] for name, part in changes.items()}

    def call(x, shard):
        where = {"axis_name": shard.axis_name, "vocab_size": V, "rank_ties": ties, **ALL}
        chosen = topk_logprobs(x, k=K, **given, **changes, **where)
        return chosen, greedy_topk_logprobs(x, 3, **own, **where)

    return call


@pytest.mark.parametrize(("shards", "dtype", "ties"), CASES)
def test_every_shard_count_gives_the_results_of_one_device(shards, dtype, ties):
    """With ragged last shards, and NaN as padding; of invalid temperatures too."""
    x, given, changes = inputs(dtype)
    actual, fused = on_shards(program(dtype, ties), shards, x, V, P())
    t = given["temperatures"]
    known = given | {"temperatures": np.where(t < 0, np.nan, t)}
    exact = oracle.topk_logprobs(x, k=K, **known, **changes, rank_ties=ties)
    good = t >= 0
    exact = oracle.Expected(*(np.asarray(part)[good] for part in exact))
    oracle.assert_matches(jax.tree.map(lambda a: np.asarray(a)[good], actual), exact)
    assert np.isnan(np.asarray(actual.logprobs)[~good, 0]).all()
    own = {name: part[: len(x)] for name, part in changes.items()}
    choices = [oracle.greedy_token_id(row) for row in in_float64(x, own)]
    oracle.assert_matches(fused, oracle.topk_logprobs(x, choices, 3, **own, rank_ties=ties))


class TestOutside:
    """Sharded arrays, without shard_map around the call."""

    x = edge_rows(304, "float32")
    token_ids = np.arange(14, dtype=np.int32) * 20

    def expected(self):
        return programs.topk_logprobs(self.x, self.token_ids, 7)

    def placed(self, axis_type, shards=4):
        mesh = jax.make_mesh(
            (shards, 2), ("model", "data"), axis_types=(axis_type,) * 2,
            devices=jax.devices()[: 2 * shards],
        )  # fmt: skip
        return mesh, jax.device_put(self.x, NamedSharding(mesh, P(None, "model")))

    def test_the_caller_tells_under_jit(self):
        mesh, x = self.placed(AxisType.Auto)
        call = compiled(
            lambda x: topk_logprobs(x, self.token_ids, 7, mesh=mesh, axis_name="model"), x
        )
        assert_same(call(x), self.expected())
        assert largest(call) < 4 * 14 * 304 / 4

    def test_padding(self):
        mesh = mesh_of(4)
        x = padded(self.x[:, :301], 4)
        x = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
        ids = np.minimum(self.token_ids, 300)
        expected = programs.topk_logprobs(self.x[:, :301], ids, 7)
        assert_same(topk_logprobs(x, ids, 7, vocab_size=301), expected)
        # One device may pad as well.
        assert_same(programs.topk_logprobs(np.asarray(x), ids, 7, vocab_size=301), expected)

    def test_refused(self):
        mesh = mesh_of(4)
        for options, words in (
            ({"mesh": mesh}, "without axis_name"),
            ({"axis_name": "model"}, "no axis of a shard_map"),
            ({"mesh": mesh, "axis_name": "vocab"}, "is not an axis of the mesh"),
            ({"vocab_size": 305}, "vocab_size = 305 is outside 1 .. 304"),
        ):
            with pytest.raises(ValueError, match=words):
                topk_logprobs(self.x, self.token_ids, 7, **options)
        with pytest.raises(ValueError, match="pad them and pass vocab_size = 301"):
            topk_logprobs(
                self.x[:, :301], np.minimum(self.token_ids, 300), 7, mesh=mesh, axis_name="model"
            )
        with pytest.raises(ValueError, match=r"k = 8 is outside 0 .. 7"):
            topk_logprobs(self.x[:, :8], self.token_ids, 8, vocab_size=7)


def compiled(function, *arguments):
    """The function as a program for these arguments; its text has the collectives."""
    return jax.jit(function).lower(*arguments).compile(quick_compile.UNOPTIMIZED)


def largest(program):
    """Bytes of the largest collective."""
    return max((c.num_bytes for c in collectives(program)), default=0)


@pytest.mark.parametrize("split", ["vocabulary", pytest.param("rows", marks=pytest.mark.slow)])
def test_on_a_cuda_host_programs_on_shards_take_the_kernels(split, monkeypatch):
    """Where one is lowered for CUDA; where it is lowered for the host's CPU, XLA with its values.

    Under `shard_map`, both must vary over the same mesh axes, or no program can be traced at all.
    """
    monkeypatch.setattr(choose, "cuda_capability", lambda: 9.0)
    x = np.random.default_rng(0).normal(size=(4, 4096)).astype(np.float32)
    ids, temperatures = np.arange(4, dtype=np.int32), np.full(4, 0.5, np.float32)
    extra = np.arange(8, dtype=np.int32).reshape(4, 2)
    mesh = mesh_of(2)

    def call(x, ids, extra, **where):
        chosen = topk_logprobs(x, ids, 3, temperatures=temperatures[: len(ids)], **where)
        return chosen, greedy_topk_logprobs(x, 3, extra_token_ids=extra, **where)

    if split == "vocabulary":
        function = functools.partial(call, mesh=mesh, axis_name="model")
    else:
        function = jax.shard_map(call, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
    traced = jax.jit(function).trace(x, ids, extra)
    on_cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert on_cuda.count("custom_call @mosaic_gpu") == 4
    on_cpu = traced.lower(lowering_platforms=("cpu",))
    assert "mosaic_gpu" not in on_cpu.as_text()
    actual = on_cpu.compile(quick_compile.OPTIONS)(x, ids, extra)
    xla_of = quick_compile.jit(functools.partial(call, implementation="xla"))
    for one, expected in zip(actual, xla_of(x, ids, extra), strict=True):
        assert_same(one, expected)


@pytest.mark.parametrize("shards", [pytest.param(2, marks=pytest.mark.fast), 8])
def test_what_travels_is_compact(shards):
    """Exactly the words that the module says, however long the rows are."""
    rows, k, extra = 24, 20, 2
    for vocab in (4096, 32_768):
        mesh = mesh_of(shards)
        program = compiled(
            jax.shard_map(
                lambda x, ids, more: topk_logprobs(
                    x, ids, k, extra_token_ids=more, axis_name="model"
                ),
                mesh=mesh,
                in_specs=(P(None, "model"), P(), P()),
                out_specs=P(),
            ),
            jax.ShapeDtypeStruct((rows, vocab), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, extra), jnp.int32),
        )
        found = {c.kind: c.num_bytes for c in collectives(program)}
        assert found == {
            "all-reduce": 4 * rows * (1 + extra),
            "all-gather": 4 * shards * rows * (3 + 2 * k),
        }
