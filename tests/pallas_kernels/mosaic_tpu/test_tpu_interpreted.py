"""The TPU kernel's own body, interpreted on a CPU, against the oracle.

Shapes are small, but every path is taken: several units, of which the last one is not full, and
several chunks, of which the last one is ragged; rows that the stacks cannot serve; two rows a word;
masks and biases.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.backends.mosaic_tpu import rows_kernel, unit
from pallas_kernels.backends.mosaic_tpu.schedule import CUT as REAL_CUT
from pallas_kernels.backends.mosaic_tpu.schedule import choose_schedule
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import oracle
from tests.support import kernel_calls
from tests.support.changed_logits import ALL, as_changes, bits_of, changes_of, in_float64
from tests.support.interpreted_tpu_kernel import CUT, run_interpreted

BFLOAT16 = ml_dtypes.bfloat16
V = 1173  # 9 columns of 128 tokens and 21 more; three chunks
MOST = {"log_sum_exp": True, "entropy": False, "top_logits": True}


def normal(rows, dtype=np.float32, vocabulary=V, seed=0):
    return (np.random.default_rng(seed).normal(size=(rows, vocabulary)) * 4).astype(dtype)


def with_edges(dtype, vocabulary=V):
    edges = oracle.edge_rows(vocabulary, dtype, 128)
    return np.concatenate([edges, normal(2, dtype, vocabulary)])


def check(x, k, token_ids=None, *, changed=(), ties="strict", largest=False, cut=CUT, races=True,
          **options):  # fmt: skip
    """Of given tokens, or of the `largest`; `options` are row_ids, num_rows and temperatures."""
    rng, count = np.random.default_rng(1), len(options.get("row_ids", x))
    vocabulary = x.shape[1]
    if token_ids is None:
        token_ids = rng.integers(0, vocabulary, count).astype(np.int32)
    extra = rng.integers(-1, vocabulary + 1, (count, 2)).astype(np.int32)
    arrays = {"extra_token_ids": extra, **changes_of(rng, count, vocabulary, changed)}
    if changed:
        options.setdefault("temperatures", rng.choice(np.float32([0, 0.5, 1, 2]), count))
    if "allowed" in arrays:
        arrays["allowed"][0] = bits_of([1, 5, 300 % vocabulary, vocabulary - 1], vocabulary)
        arrays["allowed"][1] = bits_of([2], vocabulary)
    if largest:
        token_ids = [oracle.greedy_token_id(row) for row in in_float64(x, arrays)]
    wanted = Outputs(k, inclusive=ties == "inclusive", **ALL if changed or largest else MOST)
    changes = as_changes(arrays) if changed else None
    given = options | {"extra_token_ids": extra, "changes": changes}

    def call(x, token_ids, given, interpret, cut):
        how = {**given, "interpret": interpret, "cut": cut}
        return kernel_calls.topk_logprobs(run, x, token_ids, wanted, **how)

    found = run_interpreted(call, x, np.int32(token_ids), given, cut=cut, races=races)
    expected = oracle.topk_logprobs(x, token_ids, k, **options, **arrays, rank_ties=ties)
    oracle.assert_matches(found, expected)


def test_rows_of_16_bits_with_every_edge():
    """Two units, the second of which is not full; ties, NaN and infinities; skipped rows."""
    edges = oracle.edge_rows(V, BFLOAT16, 128)
    x = np.concatenate([normal(10, BFLOAT16), edges, normal(2, BFLOAT16, seed=2)])
    ids = np.arange(19, dtype=np.int32)
    ids[11] = V - 1  # among equal largest logits
    temperatures = np.linspace(0, 2, 19, dtype=np.float32)
    check(x, 4, ids, num_rows=np.int32(18), temperatures=temperatures)


@pytest.mark.fast
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
    check(x, 3, np.array([7, 3, 6, 4, 5, 6], np.int32))


def test_largest_tokens_of_valid_and_invalid_rows():
    x = oracle.edge_rows(V, np.float32, 128)
    check(x, 2, largest=True, temperatures=np.full(len(x), 0.5, np.float32))


def test_masks_and_biases_of_16_bits():
    check(with_edges(BFLOAT16), 2, changed=("allowed", "bias"))


def test_masks_of_16_bits():
    """The kernel turns the words of the bits, and reads no changed copy."""
    check(with_edges(BFLOAT16), 2, changed=("allowed",))


def test_float16_in_blocks():
    """Two units of two blocks, the last of either not full; units that no row is wanted of."""
    x = np.concatenate([with_edges(np.float16), np.ones((8, V), np.float16)])
    check(x, 3, np.arange(len(x), dtype=np.int32), num_rows=np.int32(9))


def test_blocks_of_unwanted_units_are_not_copied():
    """Their grid steps have the place of the last wanted block: Pallas copies no block twice."""
    schedule = choose_schedule((40, V), 40, 0, "float16", gathered=False, entropy=False, cut=CUT)
    last = schedule.width // schedule.block // 128 - 1
    steps = [(unit, place) for unit in range(5) for place in range(last + 1)]
    for rows, units in ((0, 1), (1, 1), (9, 2), (40, 5)):
        count = jnp.array([rows])
        found = [rows_kernel.wanted_block(schedule, 0, *step, count, None) for step in steps]
        expected = [step if step[0] < units else (units - 1, last) for step in steps]
        assert [(int(a), int(b)) for a, b in found] == expected


def test_each_lane_has_its_own_tokens_bits():
    """Vectors of 128 words: bit j of lane l is token l of column j."""
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (8, 128)).astype(np.int32)
    tokens = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(8, 32, 128)
    found = np.asarray(unit.turned_words(words)).view(np.uint32)
    for column in (0, 1, 30, 31):
        expected = tokens[:, column]
        np.testing.assert_array_equal(found >> column & 1, expected)
        np.testing.assert_array_equal(unit.is_allowed(found.view(np.int32), column), expected)


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
    check(normal(3, vocabulary=vocabulary), min(3, vocabulary))
    check(normal(1, BFLOAT16, vocabulary), min(3, vocabulary))


@pytest.mark.slow
@pytest.mark.parametrize("changed", [("allowed",), ("allowed", "bias")])
@pytest.mark.parametrize("cut", [CUT, REAL_CUT])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float16])
def test_several_vectors_of_words(dtype, cut, changed):
    check(with_edges(dtype, 8500), 20, changed=changed, cut=cut)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_chunks_and_pieces_of_their_real_size(dtype):
    """Of bfloat16 a chunk has two pieces; a turn of float32 has two chunks."""
    check(normal(2, dtype, 70_001), 2, cut=REAL_CUT, races=False)


@pytest.mark.slow
def test_more_kinds_of_rows_and_calls():
    """More than one batch; maxima far from the first logits; ranks that count equal ones."""
    check(normal(70, BFLOAT16, 300), 2, num_rows=np.int32(67))
    x = normal(3)
    x[0, -1], x[1, :600], x[2, :600] = 200, -np.inf, -3e38
    check(x, 1)
    x = np.round(normal(4, vocabulary=300))
    x[1], x[2, 5] = 0, -np.inf
    check(x, 0, np.array([1, 2, 5, 9], np.int32), ties="inclusive")
    rows = np.array([8, 1, -1, 0, 1, 9], np.int32)
    check(with_edges(np.float16), 0, changed=("allowed",), ties="inclusive", row_ids=rows)
    check(with_edges(BFLOAT16), 1, changed=("allowed", "bias"), largest=True)
    check(with_edges(BFLOAT16), 1, changed=("allowed",), ties="inclusive")
