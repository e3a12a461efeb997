"""A TPU kernel with a race, which the detector must see."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import oracle
from tests.support import kernel_calls
from tests.support.interpreted_tpu_kernel import run_interpreted

V = 700
X = np.random.default_rng(5).normal(size=(9, V)).astype(np.float32)


X[8, 15] = 9.0


IDS = np.arange(9, dtype=np.int32)


def found(k=1, run_it=run_interpreted):
    def call(x, ids, interpret, cut):
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        return kernel_calls.topk_logprobs(
            run, x, ids, Outputs(k), None, None, None, nothing, None, interpret, cut
        )

    return run_it(call, X, IDS)


def is_caught(k=1):
    """Whether the oracle's results differ, or the interpreter stops."""
    try:
        oracle.assert_matches(found(k), oracle.topk_logprobs(X, IDS, k))
    except AssertionError:
        return True
    return False
