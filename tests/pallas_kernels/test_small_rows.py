"""Rows of a few logits, whose answers are checked on paper."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import TopkLogprobs
from pallas_kernels.sampling import emitted_logprobs
from pallas_kernels.sampling.types import RowsRead
from tests.support import quick_compile
from tests.support.programs import greedy, topk_logprobs

pytestmark = pytest.mark.fast

INF, NAN = np.inf, np.nan


def test_by_hand():
    """A row small enough to check on paper: ln(1 + 2 + 4 + 1) = ln 8."""
    x = np.log(np.array([[1, 2, 4, 1]], np.float32))
    out = topk_logprobs(x, np.array([1], np.int32), 4)
    np.testing.assert_array_equal(out.token_ids, [[1, 2, 1, 0, 3]])
    np.testing.assert_allclose(out.logprobs, np.log([[2, 4, 2, 1, 1]]) - np.log(8), atol=1e-6)
    assert out.token_ranks.tolist() == [2]
    assert out.extra_logprobs.shape == (1, 0)


def one_row(values, token, extra=(0, 1), temperature=None):
    """The answer for a row of 6 logits and K = 6, as plain lists; missing logits are -inf."""
    row = np.full((1, 6), -INF, np.float32)
    row[0, : len(values)] = values
    found = topk_logprobs(
        row,
        np.array([token], np.int32),
        6,
        temperatures=None if temperature is None else np.array([temperature], np.float32),
        extra_token_ids=np.array([extra], np.int32),
    )
    return [np.asarray(part)[0].tolist() for part in found if part is not None]


def test_equal_logits_share_the_best_rank_and_come_lowest_id_first():
    row = [1.0, 3.0, -0.0, 3.0, 0.0, 3.0]
    for token, rank in enumerate([4, 1, 5, 1, 5, 1]):
        ids, logprobs, got, _ = one_row(row, token)
        assert got == rank
        assert ids == [token, 1, 3, 5, 0, 2, 4]  # -0.0 before 0.0: they are equal, 2 < 4
    # The emitted token once in column 0 and once in its place.
    assert ids[:4] == [5, 1, 3, 5]
    assert len(set(logprobs[:4])) == 1


def test_missing_invalid_and_skipped_columns():
    ids, logprobs, rank, extra = one_row([-INF, 2.0, -INF], 0, extra=[1, 2])
    assert (ids, logprobs) == ([0, 1, *[-1] * 5], [-INF, 0, *[-INF] * 5])
    assert (rank, extra) == (2, [0, -INF])
    ids, logprobs, rank, extra = one_row([INF, 2.0, 1.0], 1, extra=[1, 2])
    assert (ids, rank) == ([1, *[-1] * 6], 0)
    assert np.isnan([*logprobs, *extra]).all()
    found = topk_logprobs(jnp.zeros((3, 4)), jnp.zeros(3, jnp.int32), 1, num_rows=jnp.int32(1))
    assert np.asarray(found.token_ids).tolist() == [[0, 0], [-1, -1], [-1, -1]]
    assert np.asarray(found.token_ranks).tolist() == [1, 0, 0]
    np.testing.assert_array_equal(np.isnan(found.logprobs[:, 0]), [False, True, True])


def test_scaled_logprobs_keep_the_raw_order_and_rank():
    row = [1.0, 4.0, 2.0]
    exact = np.exp(np.array(row) / 2)
    exact = np.log(exact / exact.sum())
    ids, logprobs, rank, extra = one_row(row, 2, temperature=2)
    assert (ids[:4], rank) == ([2, 1, 2, 0], 2)
    np.testing.assert_allclose(logprobs[:4], exact[ids[:4]], atol=1e-6)
    np.testing.assert_allclose(extra, exact[[0, 1]], atol=1e-6)
    # So hot that all scaled logits are equal in float32: the raw ones still decide.
    ids, logprobs, rank, _ = one_row([1.0, 1.0 + 2**-20, 1.0], 0, temperature=1e9)
    assert (ids[:4], rank) == ([0, 1, 0, 2], 2)
    assert len(set(logprobs[:4])) == 1
    # T = 0 is greedy, whose scaled logprobs use T = 1.
    assert one_row(row, 2, temperature=0) == one_row(row, 2)


@pytest.mark.parametrize("k", [0, 2])
def test_ranks_of_rows_that_were_read(k):
    """Of a token among the top K and of others, which are counted; without one; of no answer."""
    x = np.log(np.array([[1, 2, 4, 0.5, 0.5]] * 5, np.float32))
    tokens = np.array([2, 1, 4, -1, 1], np.int32)
    sums = np.array([2, 2, 2, 2, NAN], np.float32)  # 8 / 4
    top = np.array([[2, 1]] * 5, np.int32)[:, :k]
    top_logits, maxima = x[:, [2, 1]][:, :k], x[:, 2:3]
    plain = np.zeros((5, 1), np.float32), np.ones((5, 1), np.float32)
    read = RowsRead(
        maxima, np.log(sums)[:, None], *plain, top[:, None], top_logits[:, None], maxima[:, None]
    )
    found = quick_compile.jit(emitted_logprobs)(x[:, None], tokens[:, None], read)
    assert found.token_ranks.tolist() == [1, 2, 4, 0, 0]
    expected = np.log([4, 2, 0.5, NAN, NAN]) - np.log(8)
    np.testing.assert_allclose(found.logprobs[:, 0], expected, atol=1e-6)
    answers = np.where(np.isnan(sums)[:, None], -1, top)
    np.testing.assert_array_equal(found.token_ids, np.c_[tokens, answers])


def test_the_kernels_result_has_the_stated_shapes_and_dtypes():
    found = topk_logprobs(jnp.zeros((4, 9), jnp.bfloat16), jnp.zeros(4, jnp.int32), 3)
    assert isinstance(found, TopkLogprobs)
    assert [(part.shape, part.dtype.name) for part in found if part is not None] == [
        ((4, 4), "int32"),
        ((4, 4), "float32"),
        ((4,), "int32"),
        ((4, 0), "float32"),
    ]


def test_logits_of_any_size():
    """Large logits, and a spread that leaves float32's range only at the end."""
    x = np.array([[3e38, -3e38, 0, 3e38], [1e-40, 0, -1e-40, 2e-40]], np.float32)
    out = topk_logprobs(x, np.array([0, 3], np.int32), 2)
    assert out.token_ids.tolist()[0] == [0, 0, 3]
    np.testing.assert_allclose(out.logprobs[0], [-np.log(2)] * 3, rtol=1e-6)
    np.testing.assert_allclose(out.logprobs[1], [-np.log(4)] * 3, rtol=1e-6)


def test_no_rows():
    out = topk_logprobs(np.zeros((0, 9), np.float32), np.zeros(0, np.int32), 3)
    assert [x.shape for x in out if x is not None] == [(0, 4), (0, 4), (0,), (0, 0)]
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
