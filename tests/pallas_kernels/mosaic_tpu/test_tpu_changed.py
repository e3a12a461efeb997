"""The TPU kernel on changed logits and float16, interpreted, against the oracle."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.backends.mosaic_tpu import rows_kernel, unit
from pallas_kernels.backends.mosaic_tpu.schedule import CUT as REAL_CUT
from pallas_kernels.backends.mosaic_tpu.schedule import choose_schedule
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import oracle
from tests.support import kernel_calls
from tests.support.changed_logits import ALL, bits_of, changes_of, in_float64
from tests.support.interpreted_tpu_kernel import CUT, run_interpreted

BFLOAT16 = ml_dtypes.bfloat16
V = 1173


def rows_with_edges(dtype, vocabulary=V):
    more = np.random.default_rng(0).normal(size=(2, vocabulary)) * 4
    return np.concatenate([oracle.edge_rows(vocabulary, dtype, 128), more.astype(dtype)])


def arguments(rows, vocabulary, changed):
    rng = np.random.default_rng(vocabulary)
    token_ids = rng.integers(0, vocabulary, rows).astype(np.int32)
    arrays = {
        "temperatures": rng.choice(np.array([0, 0.5, 1, 2], np.float32), rows),
        "extra_token_ids": rng.integers(-1, vocabulary + 1, (rows, 2)).astype(np.int32),
        **changes_of(rng, rows, vocabulary, changed),
    }
    if "allowed" in arrays:
        arrays["allowed"][0] = bits_of([1, 5, 300, vocabulary - 1], vocabulary)
        arrays["allowed"][1] = bits_of([2], vocabulary)
    return token_ids, arrays


def after_wanted(arrays):
    words = arrays.get("allowed")
    changes = Changes(
        None if words is None else words.view(np.int32),
        arrays.get("bias_token_ids"),
        arrays.get("bias"),
    )
    return arrays["temperatures"], arrays["extra_token_ids"], changes


def separate(x, k, token_ids, arrays, ties="strict", row_ids=None, cut=CUT):
    wanted = Outputs(k, inclusive=ties == "inclusive", **ALL)

    def call(x, token_ids, row_ids, rest, interpret, cut):
        return kernel_calls.topk_logprobs(
            run, x, token_ids, wanted, row_ids, None, *rest, interpret, cut
        )

    return run_interpreted(call, x, token_ids, row_ids, after_wanted(arrays), cut=cut)


def check(x, k, changed, ties="strict", row_ids=None, cut=CUT):
    count = len(x) if row_ids is None else len(row_ids)
    token_ids, arrays = arguments(count, x.shape[1], changed)
    found = separate(x, k, token_ids, arrays, ties, row_ids, cut)
    expected = oracle.topk_logprobs(x, token_ids, k, row_ids=row_ids, **arrays, rank_ties=ties)
    oracle.assert_matches(found, expected)


def test_masks_and_biases_of_16_bits():
    check(rows_with_edges(BFLOAT16), 2, ("allowed", "bias"))


def test_float16_in_blocks():
    """Two units of two blocks, the last of either not full; units that no row is wanted of."""
    x = np.concatenate([rows_with_edges(np.float16), np.ones((8, V), np.float16)])
    token_ids, count = np.arange(len(x), dtype=np.int32), np.int32(9)

    def call(x, ids, interpret, cut):
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        rest = (None, count, None, nothing, None)
        return kernel_calls.topk_logprobs(run, x, ids, Outputs(3), *rest, interpret, cut)

    found = run_interpreted(call, x, token_ids)
    oracle.assert_matches(found, oracle.topk_logprobs(x, token_ids, 3, num_rows=count))


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


@pytest.mark.slow
def test_gathered_float16_with_a_mask():
    rows = np.array([8, 1, -1, 0, 1, 9], np.int32)
    check(rows_with_edges(np.float16), 0, ("allowed",), "inclusive", rows)


def test_each_lane_has_its_own_tokens_bits():
    """Vectors of 128 words: bit j of lane l is token l of column j."""
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (8, 128)).astype(np.int32)
    tokens = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(8, 32, 128)
    found = np.asarray(unit.turned(words)).view(np.uint32)
    for column in (0, 1, 30, 31):
        expected = tokens[:, column]
        np.testing.assert_array_equal(found >> column & 1, expected)
        np.testing.assert_array_equal(unit.is_allowed(found.view(np.int32), column), expected)


@pytest.mark.slow
def test_a_wrong_mask_is_caught(monkeypatch):
    """Negative control: the bits of the columns beside."""
    right = unit.is_allowed
    monkeypatch.setattr(unit, "is_allowed", lambda words, column: right(words, column ^ 1))
    with pytest.raises(AssertionError):
        check(rows_with_edges(np.float32)[:2], 0, ("allowed",))


@pytest.mark.slow
@pytest.mark.parametrize("cut", [CUT, REAL_CUT])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float16])
def test_several_vectors_of_words(dtype, cut):
    check(rows_with_edges(dtype, 8500), 20, ("allowed", "bias"), cut=cut)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "ties"), [(("allowed", "bias"), "strict"), (("allowed",), "inclusive")]
)
def test_the_greedy_choice_of_changed_logits(changed, ties):
    x = rows_with_edges(BFLOAT16)
    _, arrays = arguments(len(x), V, changed)
    wanted = Outputs(1, inclusive=ties == "inclusive", **ALL)

    def call(x, rest, interpret, cut):
        return kernel_calls.greedy_topk_logprobs(run, x, wanted, None, *rest, interpret, cut)

    found = run_interpreted(call, x, after_wanted(arrays))
    chosen = [oracle.greedy_token_id(row) for row in in_float64(x, arrays)]
    oracle.assert_matches(found, oracle.topk_logprobs(x, chosen, 1, **arrays, rank_ties=ties))
