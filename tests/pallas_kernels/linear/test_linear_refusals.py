"""What the linear calls refuse, and with which words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_kept_logprobs, linear_topk_logprobs
from tests.support import shape_checks

GOOD = {
    "hidden": np.zeros((3, 8), np.float32),
    "head": np.zeros((10, 8), np.float32),
    "token_ids": np.zeros(3, np.int32),
    "k": 2,
}
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"hidden": np.zeros((3, 8), np.int32)}, TypeError, "hidden has dtype int32"),
    ({"hidden": np.zeros((3, 8))}, TypeError, "64-bit"),
    ({"hidden": np.zeros(8, np.float32)}, ValueError, r"hidden has shape \[8\].*\[N, H\]"),
    ({"hidden": jnp.zeros((3, 8), jnp.bfloat16)}, TypeError, "bfloat16 and head float32"),
    ({"head": np.zeros((8, 10), np.float32)}, ValueError, "its head_axes"),
    ({"head_axes": "HV"}, ValueError, r"must be \[H, V\]"),
    ({"head_axes": "hv"}, ValueError, "head_axes = 'hv' must be"),
    ({"head": np.zeros((0, 8), np.float32)}, ValueError, "head has 0 tokens"),
    ({"head": [[1.0]]}, TypeError, "list"),
    ({"token_ids": np.zeros(4, np.int32)}, ValueError, "pass row_ids"),
    ({"k": 11}, ValueError, "outside 0 .. 10"),
    ({"temperatures": np.zeros(2, np.float32)}, ValueError, "temperatures has shape"),
    ({"extra_token_ids": np.zeros((3, 513), np.int32)}, ValueError, "the limit is 512"),
    ({"bias": np.zeros(9, np.float32)}, ValueError, r"must be \[10\]"),
    ({"bias": np.zeros(10, np.int32)}, TypeError, "bias has dtype int32"),
    ({"scale": float("inf")}, ValueError, "scale = inf"),
    ({"scale": "2"}, ValueError, "scale = '2'"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap = 0.0 must be a positive"),
    ({"logits_dtype": "int8"}, ValueError, "logits_dtype = 'int8'"),
    ({"implementation": "mosaic_gpu"}, NotImplementedError, "cannot run: it has no product"),
    ({"implementation": "fast"}, ValueError, "'fast' is not known"),
    ({"axis_name": "model"}, ValueError, "no axis of a shard_map"),
    ({"row_axis_name": "data"}, ValueError, "without mesh"),
    ({"mesh": MESH}, ValueError, "name the vocabulary's axis"),
    ({"mesh": MESH, "axis_name": "x"}, ValueError, "'x' is not an axis"),
    ({"mesh": MESH, "row_axis_name": "data"}, ValueError, "3 rows of hidden do not divide"),
    ({"mesh": MESH, "axis_name": ("data", "model")}, ValueError, "10 rows of head do not"),
    ({"mesh": MESH, "axis_name": "data", "row_axis_name": "data"}, ValueError, "share a mesh"),
    ({"vocab_size": 11}, ValueError, "vocab_size = 11"),
    ({"hidden": np.zeros((4, 8), np.float32), "row_ids": np.zeros(3, np.int32), "mesh": MESH,
      "row_axis_name": "data"}, ValueError, "gather the rows first"),
    ({"kept_token_ids": np.zeros((3, 0), np.int32)}, ValueError, "must be 1 to 4096"),
    ({"kept_token_ids": np.zeros((3, 4097), np.int32)}, ValueError, "must be 1 to 4096"),
    ({"kept_token_ids": np.zeros((2, 4), np.int32)}, ValueError, "kept_token_ids has shape"),
    ({"kept_token_ids": np.zeros((3, 2), np.int32), "token_ids": np.zeros(2, np.int32)},
     ValueError, "token_ids has shape"),
])  # fmt: skip
def test_refused(change, error, words):
    given, call = GOOD | change, linear_topk_logprobs
    if "kept_token_ids" in change:
        call = linear_kept_logprobs
        del given["k"]
    with pytest.raises(error, match=words):
        shape_checks.as_users_run(call)(**given)
