"""Interpreted kernels are watched: no race goes unnoticed, and one that fails harms no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu import compat
from tests.support import watched_interpreters
from tests.support.racy_tpu_kernel import is_caught
from tests.support.watched_interpreters import watched


def kernel_of(body, scratch):
    """Two warpgroups that do this with x [128], an output [128] and what they share."""
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[scratch],
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=compat.compiler_params(approx_math=True),
        interpret=compat.interpret_params(detect_races=True),
    )


def raced(x, out, shared):
    shared[...] = x[...]
    out[...] = shared[...]


def fails(x, out, barrier):
    """An arrival that completes the barrier again, before anyone has waited for it."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_arrive(barrier)
    out[...] = x[...]


X = np.zeros(128, np.float32)


def slowly():
    """X, from a program that takes longer than it takes to call another one with it."""
    return jax.jit(lambda x: jnp.tanh(x @ x @ x @ x)[0, :128] * 0)(jnp.ones((2500, 2500)))


def test_a_race_of_any_kernel_is_seen():
    """Two warpgroups write one place without a barrier, in the first of two kernels."""
    racy = kernel_of(raced, plgpu.SMEM((128,), jnp.float32))
    clean = kernel_of(lambda x, out, _: None, plgpu.SMEM((128,), jnp.float32))

    def program(x):
        return clean(racy(x))

    with watched() as has_raced:
        jax.block_until_ready(jax.jit(program)(X))
    assert has_raced()
    with watched() as has_raced:
        jax.block_until_ready(jax.jit(lambda x: clean(x))(X))
    assert not has_raced()


def fail():
    """A kernel fails while nobody waits for it."""
    failing = kernel_of(fails, plgpu.Barrier(num_arrivals=1))
    program = jax.jit(lambda x: failing(x)).lower(X).compile()
    with watched():
        jax.block_until_ready(program(slowly()))


@pytest.mark.slow
def test_a_kernel_that_fails_harms_no_other(monkeypatch):
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: Barrier"):
        fail()
    test_a_race_of_any_kernel_is_seen()
    assert not is_caught()
    # Negative control: it would, were the interpreters not as new.
    with monkeypatch.context() as patched:
        patched.setattr(watched_interpreters, "_reset", lambda: None)
        with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: Barrier"):
            fail()
        with pytest.raises(jax.errors.JaxRuntimeError):
            test_a_race_of_any_kernel_is_seen()
    watched_interpreters._reset()
    test_a_race_of_any_kernel_is_seen()
