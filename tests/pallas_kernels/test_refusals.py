"""What `topk_logprobs` refuses, and with which words."""

import jax
import numpy as np
import pytest

from pallas_kernels import topk_logprobs
from tests.support import shape_checks

GOOD = {"logits": np.zeros((3, 10), np.float32), "token_ids": np.zeros(3, np.int32), "k": 2}


WORDS, IDS = np.zeros((3, 3), np.uint32), np.zeros((3, 1), np.int32)
FLOATS = np.zeros((3, 4097), np.float32)


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
        ({"k": 513, "logits": np.zeros((3, 600), np.float32)}, ValueError, "outside 0 .. 512"),
        ({"k": 1.0}, TypeError, "Python int"),
        ({"k": True}, TypeError, "Python int"),
        ({"row_ids": np.zeros(4, np.int32)}, ValueError, "row_ids has shape"),
        ({"num_rows": -1}, ValueError, "num_rows = -1 is outside 0 .. 2147483647"),
        ({"num_rows": 2**31}, ValueError, "num_rows = 2147483648 is outside"),
        ({"num_rows": np.zeros(1, np.int32)}, ValueError, "num_rows has shape"),
        ({"temperatures": np.zeros(2, np.float32)}, ValueError, "temperatures has shape"),
        ({"temperatures": np.zeros(3, np.float16)}, TypeError, "float16"),
        ({"extra_token_ids": np.zeros(3, np.int32)}, ValueError, "extra_token_ids has shape"),
        ({"extra_token_ids": np.zeros((3, 513), np.int32)}, ValueError, "limit is 512"),
        ({"implementation": "triton"}, ValueError, "'triton' is not known"),
        ({"allowed": WORDS[:, :2]}, ValueError, r"allowed has shape \[3, 2\]; it must be \[3, 1\]"),
        ({"allowed": WORDS[:, :1].astype(bool)}, TypeError, "allowed has dtype bool.*packbits"),
        ({"bias_token_ids": IDS}, TypeError, "bias is None; pass both"),
        ({"bias_token_ids": IDS, "bias": FLOATS[:, :2]}, ValueError, r"bias has shape \[3, 2\]"),
        ({"bias_token_ids": np.zeros((3, 4097), np.int32), "bias": FLOATS}, ValueError,
         "names 4097 ids for each row; the limit is 4096"),
        ({"rank_ties": "worst"}, ValueError, "rank_ties = 'worst' is not known; choose one"),
    ],
)  # fmt: skip
def test_refused(change, error, words):
    call = shape_checks.as_users_run(topk_logprobs)
    call(**GOOD)
    with pytest.raises(error, match=words):
        call(**(GOOD | change))


def test_a_vocabulary_beyond_float32s_counts_is_refused():
    """Only traced: it needs no memory."""
    tokens = jax.ShapeDtypeStruct((1,), np.int32)

    def shape(vocabulary):
        logits = jax.ShapeDtypeStruct((1, vocabulary), np.float32)
        return jax.eval_shape(lambda x, t: topk_logprobs(x, t, 1).token_ranks, logits, tokens).shape

    assert shape(2**24) == (1,)
    with pytest.raises(ValueError, match="16777217 columns; the limit is 16777216 on a device"):
        shape(2**24 + 1)


def test_the_largest_number_of_rows_is_taken():
    tokens = GOOD["token_ids"]
    like = jax.eval_shape(lambda x: topk_logprobs(x, tokens, 2, num_rows=2**31 - 1), GOOD["logits"])
    assert like.token_ranks.shape == tokens.shape
