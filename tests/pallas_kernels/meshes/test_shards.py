"""`topk_logprobs` on vocabulary shards: the results of one device, and what travels for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from pallas_kernels import greedy, topk_logprobs
from pallas_kernels.backends.mosaic_gpu import limits
from pallas_kernels.testing import oracle
from tests.support import programs, quick_compile
from tests.support.changed_logits import ALL, bits_of, changes_of
from tests.support.proved_kernels import proved_kernels  # noqa: F401
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
    x = np.round(rng.normal(0, 4, (7, vocab)), 1)
    x[0] = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    x[1, ::7], x[2] = 9.0, np.nan
    x[3] *= 1e3 if dtype == "float16" else 1e30
    x[4, : vocab // 2] = -np.inf
    return np.concatenate([oracle.edge_rows(vocab, "float64", 8), x]).astype(jnp.dtype(dtype))


def assert_same(actual, expected):
    """Ids and ranks to the bit, logprobs within the bound of the contract twice."""
    for a, b in zip(actual[:4], expected[:4], strict=True):
        np.testing.assert_allclose(a, b, rtol=4e-7, atol=2e-5)


@functools.cache
def inputs(dtype):
    """Rows, and what a call takes of them, with masks that begin inside of shards and biases."""
    x, rng = edge_rows(V, dtype), np.random.default_rng(1)
    # Rows out of order and skipped, ids of every shard and outside, temperatures of every kind.
    row_ids = np.int32([*range(len(x)), 3, -1, len(x), 0, 0, 5])
    count = len(row_ids)
    given = {
        "token_ids": np.int32([V - 1, V, -1, 0, *rng.integers(0, V, count - 4)]),
        "row_ids": row_ids,
        "num_rows": np.int32(count - 2),
        "temperatures": rng.choice(np.float32([1, 0.3, 0, 7, -1]), count),
        "extra_token_ids": np.int32(rng.integers(-1, V + 1, (count, 3))),
    }
    changes = changes_of(np.random.default_rng(0), count, V)
    changes["allowed"][0] = bits_of([V - 1], V)  # one shard alone has a token
    changes["allowed"][8:] = np.uint32(2**32 - 1)
    changes["bias_token_ids"][8, :3] = [0, V - 1, -1]  # a tie of the first and the last id
    changes["bias"][8, :2] = [50 - x[8, 0], 50 - x[8, V - 1]]
    return x, given, changes


@functools.cache
def program(dtype, ties):
    """call(columns of x, shard) with every option, of given tokens; of all rows' greedy ones."""
    x, given, changes = inputs(dtype)
    own = {name: part[: len(x)] for name, part in changes.items()}

    def call(x, shard):
        where = {"axis_name": shard.axis_name, "vocab_size": V, "rank_ties": ties, **ALL}
        chosen = topk_logprobs(x, k=K, **given, **changes, **where)
        largest = greedy(x, axis_name=shard.axis_name, vocab_size=V).token_ids
        return chosen, topk_logprobs(x, largest, 3, **own, **where)

    return call


@pytest.mark.parametrize(("shards", "dtype", "ties"), CASES)
def test_every_shard_count_gives_the_results_of_one_device(shards, dtype, ties):
    """With ragged last shards, and NaN as padding; of invalid temperatures too."""
    x, given, changes = inputs(dtype)
    actual, of_largest = on_shards(program(dtype, ties), shards, x, V, P())
    t = given["temperatures"]
    known = given | {"temperatures": np.where(t < 0, np.nan, t)}
    exact = oracle.topk_logprobs(x, k=K, **known, **changes, rank_ties=ties)
    good = t >= 0
    exact = oracle.Expected(*(np.asarray(part)[good] for part in exact))
    oracle.assert_matches(jax.tree.map(lambda a: np.asarray(a)[good], actual), exact)
    assert np.isnan(np.asarray(actual.logprobs)[~good, 0]).all()
    own = {name: part[: len(x)] for name, part in changes.items()}
    choices = [oracle.greedy_token_id(row) for row in x]
    oracle.assert_matches(of_largest, oracle.topk_logprobs(x, choices, 3, **own, rank_ties=ties))


OUTSIDE = edge_rows(304, "float32"), np.arange(14, dtype=np.int32) * 20


def test_sharded_arrays_with_padding():
    """Without shard_map around the call, and without jit; one device may pad as well."""
    x, ids = OUTSIDE[0][:, :301], np.minimum(OUTSIDE[1], 300)
    expected = programs.topk_logprobs(x, ids, 7)
    split = jax.device_put(padded(x, 4), NamedSharding(mesh_of(4), P(None, "model")))
    assert_same(topk_logprobs(split, ids, 7, vocab_size=301), expected)
    assert_same(programs.topk_logprobs(padded(x, 4), ids, 7, vocab_size=301), expected)


def test_refused():
    x, ids = OUTSIDE
    on_mesh = {"mesh": mesh_of(4)}
    for columns, k, options, words in (
        (304, 7, on_mesh, "without axis_name"),
        (304, 7, {"axis_name": "model"}, "no axis of a shard_map"),
        (304, 7, {**on_mesh, "axis_name": "vocab"}, "is not an axis of the mesh"),
        (304, 7, {"vocab_size": 305}, "vocab_size = 305 is outside 1 .. 304"),
        (301, 7, {**on_mesh, "axis_name": "model"}, "pad them and pass vocab_size = 301"),
        (8, 8, {"vocab_size": 7}, r"k = 8 is outside 0 .. 7"),
    ):
        with pytest.raises(ValueError, match=words):
            topk_logprobs(x[:, :columns], np.minimum(ids, columns - 1), k, **options)


@pytest.mark.parametrize("split", ["vocabulary", pytest.param("rows", marks=pytest.mark.slow)])
def test_on_a_cuda_host_programs_on_shards_take_the_kernels(split, monkeypatch):
    """Where one is lowered for CUDA; where it is lowered for the host's CPU, XLA with its values.

    Under `shard_map`, both must vary over the same mesh axes, or no program can be traced at all.
    """
    monkeypatch.setattr(limits, "cuda_capability", lambda: 9.0)
    x = np.random.default_rng(0).normal(size=(4, 4096)).astype(np.float32)
    ids, temperatures = np.arange(4, dtype=np.int32), np.full(4, 0.5, np.float32)
    extra = np.arange(8, dtype=np.int32).reshape(4, 2)
    kinds = (AxisType.Auto,) * 2  # one axis is not the call's
    mesh = jax.make_mesh((2, 2), ("model", "data"), axis_types=kinds, devices=jax.devices()[:4])

    def call(x, ids, extra, **where):
        chosen = topk_logprobs(x, ids, 3, temperatures=temperatures[: len(ids)], **where)
        named = {name: where[name] for name in ("mesh", "axis_name") if name in where}
        largest = greedy(x, **named).token_ids
        return chosen, topk_logprobs(x, largest, 3, extra_token_ids=extra, **where)

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
