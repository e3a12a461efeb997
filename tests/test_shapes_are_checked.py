"""The shapes in signatures are checked by every test, and only by tests; that check can fail."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Int32, TypeCheckError

from pallas_kernels import TopkLogprobs, topk_logprobs
from pallas_kernels.contract import types
from tests.support import shape_checks
from tests.support.processes import output_of

X = np.zeros((3, 10), np.float32)
IDS = np.zeros(3, np.int32)


def good(rows=3, k1=3, dtype=jnp.float32):
    """What a call returns for 3 rows and K = 2, except what an argument changes."""
    columns = jnp.zeros((rows, k1), dtype)
    return TopkLogprobs(
        jnp.zeros((3, 3), jnp.int32), columns, jnp.zeros(3, jnp.int32), columns[:, :0]
    )


@shape_checks.checked
def returned(token_ids: Int32[types.AnyArray, " R"], value: object) -> TopkLogprobs | None:
    return value


@pytest.mark.parametrize("arguments", [
    (X[0], IDS, 2), (X.astype(np.int32), IDS, 2), (X, IDS.astype(np.int16), 2),
    (X, IDS[:, None], 2),
])  # fmt: skip
def test_a_wrong_shape_or_dtype_is_noticed_where_it_is_given(arguments):
    topk_logprobs(X, IDS, 2)
    with pytest.raises(TypeCheckError, match=r"parameter '(logits|token_ids)'"):
        topk_logprobs(*arguments)


@pytest.mark.parametrize(
    "value", [good(rows=2), good(k1=4), good(dtype=jnp.bfloat16), good()._replace(logprobs=None)]
)
def test_carriers_are_looked_into_when_they_are_returned(value):
    returned(IDS, good())
    returned(IDS, None)
    with pytest.raises(TypeCheckError, match="return value"):
        returned(IDS[:2], good())  # its letters are those of the function
    with pytest.raises(TypeCheckError, match="return value"):
        returned(IDS, value)


def test_a_users_process_checks_nothing_more():
    """Without the hook no wrapper stands before the door, and its own words refuse."""
    code = """
import sys, numpy as np, pallas_kernels
assert not hasattr(pallas_kernels.topk_logprobs, "__wrapped__")
assert "beartype" not in sys.modules
try:
    pallas_kernels.topk_logprobs(np.zeros(10, np.float32), np.zeros(3, np.int32), 2)
except ValueError as error:
    print(error)
"""
    assert "it must be [N, V]" in output_of(code)
