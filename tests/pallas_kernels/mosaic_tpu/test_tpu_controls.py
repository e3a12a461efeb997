"""Negative controls: a TPU kernel that is wrong in one place is caught when it is interpreted."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.backends.mosaic_tpu import unit
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import oracle
from tests.support import kernel_calls
from tests.support.interpreted_tpu_kernel import run_interpreted, run_watched

V = 700
X = np.random.default_rng(5).normal(size=(9, V)).astype(np.float32)
IDS = np.arange(9, dtype=np.int32)


def found(run_it=run_interpreted):
    def call(x, ids, interpret, cut):
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        rest = (None, None, None, nothing, None, interpret, cut)
        return kernel_calls.topk_logprobs(run, x, ids, Outputs(1), *rest)

    return run_it(call, X, IDS)


def test_a_wait_left_out(monkeypatch):
    """What was never copied is read; where it is copied at once, a race is found."""
    wait = unit.Copies.wait

    def all_but_one(self, number, index, tokens):
        if tokens != V - 512:  # the last chunk's
            wait(self, number, index, tokens)

    monkeypatch.setattr(unit.Copies, "wait", all_but_one)
    with pytest.raises(AssertionError):
        oracle.assert_matches(found(), oracle.topk_logprobs(X, IDS, 1))
    assert found(run_it=partial(run_watched, copied="eager"))[1]
