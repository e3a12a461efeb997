"""The tables that serving engines hold."""

import numpy as np
import pytest

from pallas_kernels import logprobs_tensors, padded_token_ids
from pallas_kernels.testing import oracle
from tests.support import programs

R, V, K = 5, 300, 6
NUMS = np.array([0, 6, 2, 1, 5], np.int32)


def test_each_row_fills_its_own_columns():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(R, V)).astype(np.float32)
    x[1, 4:] = -np.inf  # fewer tokens than it asks for
    x[4, 7] = np.nan
    ids = rng.integers(0, V, R).astype(np.int32)

    t = np.full(R, 0.5, np.float32)
    found = programs.logprobs_tensors(x, ids, K, NUMS, temperatures=t)
    expected = oracle.topk_logprobs(x, ids, K, temperatures=t)
    for r, num in enumerate(NUMS):
        own = slice(0, num + 1)
        np.testing.assert_array_equal(found.logprob_token_ids[r, own], expected.token_ids[r, own])
        np.testing.assert_allclose(found.logprobs[r, own], expected.logprobs[r, own], atol=2e-5)
        assert (np.asarray(found.logprob_token_ids[r, num + 1 :]) == -1).all()
        assert (np.asarray(found.logprobs[r, num + 1 :]) == -np.inf).all()
    np.testing.assert_array_equal(found.selected_token_ranks, expected.token_ranks)


def test_chosen_ids_of_ragged_lists():
    wanted = [[3, 5], None, [], [299]]
    table = padded_token_ids(wanted)
    np.testing.assert_array_equal(table, [[3, 5], [-1, -1], [-1, -1], [299, -1]])
    x = np.random.default_rng(0).normal(size=(4, V)).astype(np.float32)
    found = programs.topk_logprobs(
        x, np.zeros(4, np.int32), 0, extra_token_ids=table
    ).extra_logprobs
    np.testing.assert_array_equal(np.isnan(found), table == -1)
    np.testing.assert_allclose(found[0], oracle.log_softmax(x[0])[[3, 5]], atol=2e-5)
    assert padded_token_ids(wanted, 16).shape == (4, 16)
    assert padded_token_ids([None]).shape == (1, 0)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([1, 2, 3], ValueError, "a row names 3 token ids; the table has 2 columns"),
        ([1.5], TypeError, r"token_ids has \[1.5\]"),
        ([2**32 + 1], ValueError, "token_ids has 4294967297"),
    ],
)
def test_what_does_not_fit_is_refused(ids, error, words):
    with pytest.raises(error, match=words):
        padded_token_ids([ids], 2)


def test_numbers_of_columns_that_there_are_not_are_refused():
    x, ids = np.zeros((2, V), np.float32), np.zeros(2, np.int32)
    for number in (-1, 4):
        with pytest.raises(ValueError, match=f"top_k_nums has {number}: .* 0 to k = 3"):
            logprobs_tensors(x, ids, 3, np.int32([1, number]))
    with pytest.raises(TypeError, match="k is '3'"):
        logprobs_tensors(x, ids, "3", np.int32([1, 2]))
