"""Rows of a few logits, whose answers are checked on paper."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import TopkLogprobs
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


def test_the_raw_logits_decide_where_scaled_ones_are_equal():
    """So hot that they are in float32; -0.0 and 0.0 are equal too, and the lower id comes first."""
    x = np.float32([[1, 1 + 2**-20, 1, -0.0, 0.0]])
    out = topk_logprobs(x, np.array([0], np.int32), 5, temperatures=np.float32([1e9]))
    assert (out.token_ids.tolist(), out.token_ranks.tolist()) == ([[0, 1, 0, 2, 3, 4]], [2])
    assert len(set(out.logprobs[0, :4].tolist())) == 1


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
