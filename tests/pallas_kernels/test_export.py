"""`jax.export` from any host: kernels in programs for CUDA, XLA in others, any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_kernels import greedy, topk_logprobs
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.testing import oracle
from tests.support import quick_compile
from tests.support.proved_kernels import proved_kernels  # noqa: F401

K, V = 5, 4096
ALLOWED = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
SHAPES = (jax.ShapeDtypeStruct((8, V), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32))


def kernels(platforms, implementation=None):
    """The number of kernels in an exported program for these platforms."""

    def both(x, ids):  # another function each time: JAX keeps what it lowered
        chosen = topk_logprobs(x, ids, K, implementation=implementation)
        largest = greedy(x).token_ids
        return chosen, topk_logprobs(x, largest, 2 * K, implementation=implementation)

    made = export.export(jax.jit(both), platforms=platforms, disabled_checks=ALLOWED)(*SHAPES)
    return made.mlir_module().count("custom_call @mosaic_gpu")


@pytest.mark.parametrize(
    ("platforms", "count"),
    [pytest.param(["cpu", "cuda"], 4, marks=pytest.mark.chips), (["cpu"], 0)],
)
def test_programs_for_cuda_have_the_kernels_in_them(platforms, count):
    assert kernels(platforms) == count


def test_any_number_of_rows():
    """The rows' number is a variable of the program; it comes back from its bytes too."""
    (rows,) = export.symbolic_shape("r")

    def call(x, ids):
        return topk_logprobs(x, ids, K), greedy(x)

    shapes = jax.ShapeDtypeStruct((rows, 4001), jnp.float32), jax.ShapeDtypeStruct((rows,), "int32")
    made = export.export(quick_compile.jit(call), platforms=["cpu"])(*shapes)
    program = export.deserialize(made.serialize())
    for count in (1, 7, 40):
        x = np.random.default_rng(count).normal(size=(count, 4001)).astype(np.float32)
        ids = np.arange(count, dtype=np.int32)
        found, choice = program.call(x, ids)
        oracle.assert_matches(found, oracle.topk_logprobs(x, ids, K))
        np.testing.assert_array_equal(choice.token_ids, x.argmax(1))
    with pytest.raises(NotImplementedError, match="is symbolic"):
        export.export(
            jax.jit(lambda x, ids: topk_logprobs(x, ids, K, implementation="mosaic_gpu"))
        )(*shapes)


def test_only_the_platforms_function_is_traced(monkeypatch):
    """Nothing of the kernels in a program for a CPU; the control is one for CUDA."""

    class Traced(Exception):
        pass

    def traced(*_):
        raise Traced

    monkeypatch.setattr(run, "topk_logprobs", traced)
    kernels(["cpu"])
    with pytest.warns(RuntimeWarning, match="Traced"):
        kernels(["cuda"])
