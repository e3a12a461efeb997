"""Every function of both doors: compiled once outside of `jit`, and served in jax's debug modes.

All calls in all modes: `.ci/heavy modes`.
"""

import jax
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels import sampling
from tests.support.compiled_here import compiled_here
from tests.support.door_calls import NO_CALLS, door_calls
from tests.support.jax_modes import MODES


@pytest.fixture(scope="module")
def calls():
    return door_calls()


@pytest.mark.long
def test_equal_calls_of_both_doors_compile_once(calls):
    names = {name.split(",")[0].split(".")[0] for name in calls}
    assert names == {*kernels.__all__, *sampling.__all__} - {*NO_CALLS}
    client = jax.devices()[0].client
    compiled, stayed = {}, {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        before = len(client.live_executables())
        with compiled_here() as programs:
            for _ in range(20):
                jax.block_until_ready(call())
        compiled[name] = list(programs)
        stayed[name] = len(client.live_executables()) - before
    assert {name: programs for name, programs in compiled.items() if programs} == {}
    assert {name: count for name, count in stayed.items() if count > 0} == {}


def test_no_rows_hold_no_nan():
    x, ids = np.zeros((0, 5), np.float32), np.zeros(0, np.int32)
    with jax.debug_nans(True):
        assert kernels.topk_logprobs(x, ids, 2, entropy=True).logprobs.shape == (0, 3)


def test_counts_see_a_call_that_compiles_anew():
    x = jax.numpy.ones((2, 5))
    with compiled_here() as programs:
        for _ in range(2):
            jax.jit(lambda x: x + 1)(x)
    assert len(programs) == 2


# In loops that run in Python, `verify` takes a minute: the lane has it.
QUICK = {"disable_jit": ("topk_logprobs, all options", "greedy", "row_ids_of")}
IN_MODES = (
    "topk_logprobs, all options", "verify, k", "rollout_logprobs, kept",
    "logprobs_tensors, n", "verify, flat", "check_digests", "equal_digests",
)  # fmt: skip


@pytest.mark.parametrize("mode", [
    pytest.param(name, marks=[pytest.mark.long] * (name in ("checking_leaks", "x64")))
    for name in MODES
])  # fmt: skip
def test_debug_modes_change_no_result(mode, calls):
    if mode == "checking_leaks":  # what was traced before leaks nothing
        jax.clear_caches()
    context, value, _ = MODES[mode]
    for name in QUICK.get(mode, IN_MODES):
        expected = jax.tree.leaves(calls[name]())
        with context(value):
            results = jax.tree.leaves(jax.block_until_ready(calls[name]()))
        for result, right in zip(results, expected, strict=True):
            assert result.dtype == right.dtype, name
            np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-6, err_msg=name)
