"""Interpreted kernels are watched: no race goes unnoticed, and one that fails harms no other."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu import compat
from tests.support.interpreted_kernels import interpret_params
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
        interpret=interpret_params(),
    )


def raced(x, out, shared):
    shared[...] = x[...]
    out[...] = shared[...]


X = np.zeros(128, np.float32)


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
