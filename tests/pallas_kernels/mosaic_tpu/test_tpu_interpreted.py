"""The TPU kernel's own body, interpreted on a CPU, against the oracle.

Shapes are small, but every path is taken: several units, of which the last one is not full, and
several chunks, of which the last one is ragged; rows that the stacks cannot serve; two rows a word.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import oracle
from tests.support import kernel_calls
from tests.support.interpreted_tpu_kernel import run_interpreted

BFLOAT16 = ml_dtypes.bfloat16
V = 1173  # 9 columns of 128 tokens and 21 more; three chunks


def separate(k, x, token_ids, interpret, cut, **options):
    wanted = Outputs(k, log_sum_exp=True, entropy=False, top_logits=True)
    rest = [options.get(name) for name in ("row_ids", "num_rows", "temperatures")]
    extra = options["extra_token_ids"]
    return kernel_calls.topk_logprobs(
        run, x, token_ids, wanted, *rest, extra, None, interpret=interpret, cut=cut
    )


def check(x, k, token_ids=None, races=True, **options):
    rng = np.random.default_rng(1)
    count = len(options.get("row_ids", x))
    if token_ids is None:
        token_ids = rng.integers(0, x.shape[1], count).astype(np.int32)
    options["extra_token_ids"] = rng.integers(-1, x.shape[1] + 1, (count, 2)).astype(np.int32)

    def call(x, token_ids, options, interpret, cut):
        return separate(k, x, token_ids, interpret, cut, **options)

    found = run_interpreted(call, x, token_ids, options, races=races)
    oracle.assert_matches(found, oracle.topk_logprobs(x, token_ids, k, **options))


def normal(rows, dtype=np.float32, vocabulary=V, seed=0):
    return (np.random.default_rng(seed).normal(size=(rows, vocabulary)) * 4).astype(dtype)


def test_rows_of_16_bits_with_every_edge():
    """Two units, the second of which is not full; ties, NaN and infinities; skipped rows."""
    edges = oracle.edge_rows(V, BFLOAT16, 128)
    x = np.concatenate([normal(10, BFLOAT16), edges, normal(2, BFLOAT16, seed=2)])
    ids = np.arange(19, dtype=np.int32)
    ids[11] = V - 1  # among equal largest logits
    temperatures = np.linspace(0, 2, 19, dtype=np.float32)
    check(x, 4, ids, num_rows=np.int32(18), temperatures=temperatures)


def test_gathered_rows_of_16_bits():
    """Any order, repeats, rows that are skipped; the last row of an odd number has no neighbour."""
    rows = np.array([8, 1, -1, 0, 1, 9, 3, 2, 7, 8], np.int32)
    check(normal(9, BFLOAT16), 0, row_ids=rows, num_rows=np.int32(9))


def test_gathered_rows_of_32_bits():
    rows = np.array([2, 0, 1, 2, 5, -3, 4, 1, 0], np.int32)
    check(normal(5), 3, row_ids=rows, temperatures=np.geomspace(0.01, 100, 9, dtype=np.float32))


def test_subnormal_logits_and_zeros_are_told_apart():
    """In the top K, by rank, and where the given token's logit is one of them."""
    x = (normal(6) * 1e-39).astype(np.float32)
    x[0, 7] = 1.0
    x[1] = np.abs(x[1])
    x[2] = -np.abs(normal(1)[0])
    x[2, 5:9] = [-1e-40, -2e-40, -0.0, 0.0]
    x[3, ::2] = -0.0
    ids = np.array([7, 3, 6, 4, 5, 6], np.int32)
    check(x, 3, ids)


@pytest.mark.slow
def test_a_maximum_far_from_the_first_logits():
    """The first columns do not say how large the others are, or have no finite logit."""
    x = normal(3)
    x[0, -1] = 200.0
    x[1, :600] = -np.inf
    x[2, :600] = -3e38
    check(x, 1)


def test_greedy_choice_of_valid_and_invalid_rows():
    x = oracle.edge_rows(V, np.float32, 128)
    temperatures = np.full(len(x), 0.5, np.float32)

    def call(x, temperatures, interpret, cut):
        extra = jnp.zeros((len(x), 0), jnp.int32)
        return kernel_calls.greedy_topk_logprobs(
            run, x, Outputs(2, entropy=True), None, temperatures, extra, None, interpret, cut
        )

    found = run_interpreted(call, x, temperatures)
    choices = [oracle.greedy_token_id(row) for row in x]
    expected = oracle.topk_logprobs(x, choices, 2, temperatures=temperatures)
    oracle.assert_matches(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("k", [1, 20, 64, 130, 512])
def test_every_k(dtype, k):
    """Up to more than the stacks' sections hold; equal logits in rows that are not ties alone.

    Copies are the same for every K; races are looked for where that takes seconds.
    """
    x = np.concatenate([oracle.edge_rows(2600, dtype, 128), normal(3, dtype, 2600)])
    x[8] = np.round(x[8])
    check(x, k, races=k <= 20)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [1, 5, 128, 512, 513, 4096])
def test_every_kind_of_vocabulary(vocabulary):
    k = min(3, vocabulary)
    check(normal(3, vocabulary=vocabulary), k)
    check(normal(1, BFLOAT16, vocabulary), k)


@pytest.mark.slow
def test_more_than_one_batch_of_rows():
    check(normal(70, BFLOAT16, 300), 2, num_rows=np.int32(67))


@pytest.mark.slow
def test_inclusive_ranks():
    x = np.round(normal(4, vocabulary=300))
    x[1] = 0.0
    x[2, 5] = -np.inf
    ids = np.array([1, 2, 5, 9], np.int32)

    def call(x, ids, interpret, cut):
        wanted = Outputs(0, inclusive=True)
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        return kernel_calls.topk_logprobs(
            run, x, ids, wanted, None, None, None, nothing, None, interpret, cut
        )

    found = run_interpreted(call, x, ids)
    oracle.assert_matches(found, oracle.topk_logprobs(x, ids, 0, rank_ties="inclusive"))
    assert jax.tree.leaves(found)
