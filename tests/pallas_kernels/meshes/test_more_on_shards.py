"""Optional results and changed logits where rows, vocabulary or both are split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from pallas_kernels import greedy_topk_logprobs, topk_logprobs
from pallas_kernels.testing import oracle
from tests.support.changed_logits import ALL, bits_of, changes_of, in_float64
from tests.support.collectives import collectives
from tests.support.quick_compile import UNOPTIMIZED as QUICK
from tests.support.shards import P, on_shards

V, K = 301, 5


@functools.cache
def inputs(vocabulary, dtype="float32"):
    rng = np.random.default_rng(vocabulary)
    rows = 8
    x = np.round(rng.normal(0, 2, (rows, vocabulary)), 0)
    x[2] = -np.inf
    x[2, vocabulary - 1] = -3.0
    x[3, 7] = np.nan
    arrays = changes_of(rng, rows, vocabulary)
    arrays["allowed"][0] = bits_of([vocabulary - 1], vocabulary)  # one shard alone has a token
    arrays["allowed"][1] = bits_of(range(vocabulary), vocabulary)
    arrays["bias_token_ids"][1, :2] = [0, vocabulary - 1]  # a tie of the first and the last id
    arrays["bias"][1, :2] = [50 - x[1, 0], 50 - x[1, vocabulary - 1]]
    arrays["temperatures"] = np.linspace(0.5, 2, rows).astype(np.float32)
    return x.astype(jnp.dtype(dtype)), rng.integers(0, vocabulary, rows).astype(np.int32), arrays


@pytest.mark.parametrize(
    ("shards", "ties"),
    [
        (3, "inclusive"),
        (8, "strict"),
        pytest.param(2, "strict", marks=pytest.mark.slow),
        pytest.param(4, "inclusive", marks=pytest.mark.slow),
    ],
)
def test_inside_shard_map(shards, ties):
    """Shards that begin inside a word of the mask, and end after the vocabulary, in NaN."""
    x, token_ids, arrays = inputs(V, "bfloat16")
    options = {**arrays, **ALL, "rank_ties": ties}

    def both(x, shard):
        where = {"axis_name": shard.axis_name, "vocab_size": V}
        chosen = topk_logprobs(
            x, token_ids, K, extra_token_ids=token_ids[:, None], **options, **where
        )
        return chosen, greedy_topk_logprobs(x, K, **options, **where)

    found, fused = on_shards(both, shards, x, V, P())
    expected = functools.partial(oracle.topk_logprobs, x, k=K, **arrays, rank_ties=ties)
    oracle.assert_matches(found, expected(token_ids=token_ids, extra_token_ids=token_ids[:, None]))
    choices = [oracle.greedy_token_id(row) for row in in_float64(x, arrays)]
    oracle.assert_matches(fused, expected(token_ids=choices))


SPLITS = {"rows": P("data", None), "both": P("data", "model")}


@pytest.mark.parametrize(
    ("kind", "split", "call"),
    [
        ("Explicit", "both", "separate"),
        ("Auto", "both", "row ids"),
        pytest.param("Auto", "rows", "fused", marks=pytest.mark.slow),
        pytest.param("Explicit", "both", "fused", marks=pytest.mark.slow),
        pytest.param("Explicit", "rows", "row ids", marks=pytest.mark.slow),
    ],
)
def test_on_meshes(kind, split, call):
    """No collective carries a row of logits, or of its mask's bits."""
    vocabulary = 512
    x, token_ids, arrays = inputs(vocabulary)
    order = np.array([3, 0, 7, 1, 2, 4, 6, 5], np.int32)
    calls = {
        "separate": lambda x: topk_logprobs(x, token_ids, K, **arrays, **ALL),
        "row ids": lambda x: topk_logprobs(x, token_ids, K, row_ids=order, **arrays, **ALL),
        "fused": lambda x: greedy_topk_logprobs(x, K, **arrays, **ALL),
    }
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(getattr(AxisType, kind),) * 2)
    with jax.set_mesh(mesh):
        there = jax.device_put(x, NamedSharding(mesh, SPLITS[split]))
        program = jax.jit(calls[call]).lower(there).compile(QUICK)
    found = program(there)
    rows = order if call == "row ids" else np.arange(len(x))
    if call == "fused":
        token_ids = [oracle.greedy_token_id(row) for row in in_float64(x, arrays)]
    oracle.assert_matches(found, oracle.topk_logprobs(x[rows], token_ids, K, **arrays))
    shapes = [shape for one in collectives(program) for _, shape in one.shapes]
    # Where every row is whole on one device, the fused read has nothing to tell another.
    assert bool(shapes) == ((split, call) != ("rows", "fused"))
    assert all(max(shape, default=1) < vocabulary // 4 for shape in shapes)
