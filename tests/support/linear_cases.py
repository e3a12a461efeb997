"""Hidden states and heads whose logits are known exactly, and calls with blocks of any size."""

import functools

import jax
import numpy as np

from pallas_kernels.linear.backward import differentiable_topk_logprobs
from pallas_kernels.linear.schedule import LinearSchedule
from pallas_kernels.linear.types import Call, Definition, LinearInputs
from pallas_kernels.meshes.placement import WHOLE
from tests.support import quick_compile

HUGE = 1e30  # its square is infinite


def factors(logits):
    """hidden [N, 3 N] and head [V, 3 N] in float32 whose product is exactly logits [N, V].

    Each row has three columns of its own: for finite logits, for +inf and for -inf; both make NaN.
    """
    rows = len(logits)
    eye = np.eye(rows, dtype=np.float32)
    nan = np.isnan(logits)
    parts = [
        np.where(np.isfinite(logits), logits, 0),
        np.where(nan | (logits == np.inf), HUGE, 0),
        np.where(nan | (logits == -np.inf), -HUGE, 0),
    ]
    hidden = np.concatenate([eye, HUGE * eye, HUGE * eye], axis=1).astype(np.float32)
    head = np.concatenate([part.T for part in parts], axis=1).astype(np.float32)
    return hidden, head


def ways(rows, width):
    """Every way through the logits, by name: see `pallas_kernels.linear.schedule`."""
    return {
        "one block": LinearSchedule(rows, width, width, rows),
        "row blocks": LinearSchedule(3, width, width, 3),
        "columns": LinearSchedule(rows, 128, 64, 5),
        "a product a part": LinearSchedule(rows, 64, 64, rows),
    }


def run(schedule, hidden, head, token_ids, k, *, bias=None, row_ids=None, num_rows=None,
        temperatures=None, extra_token_ids=None, entropy=False, definition=None, shard=WHOLE,
        compiler=quick_compile.jit):  # fmt: skip
    """`linear_topk_logprobs` with blocks as this schedule says."""
    if extra_token_ids is None:
        extra_token_ids = np.zeros((len(token_ids), 0), np.int32)
    call = Call(definition or Definition(), k, entropy, shard, schedule)
    arrays = (hidden, head, bias, token_ids, row_ids, num_rows, temperatures, extra_token_ids)
    return jax.block_until_ready(program(call, compiler)(*arrays))


@functools.cache
def program(call, compiler):
    """One for all tests that make a call with one compiler; a test that patches passes its own."""
    return compiler(lambda *arrays: differentiable_topk_logprobs(call, LinearInputs(*arrays)))
