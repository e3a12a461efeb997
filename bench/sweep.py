"""The `kernels` suite on a CPU: what K, the batch and the vocabulary each cost, and a copy beside.

One of them is changed at a time. On a GPU `bench.gpu_kernels` measures a whole grid of shapes, with
a copy of its own; this is what a CPU can do of it in a minute.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from bench import gpu_contenders, kernels
from bench.comparison import Comparison, shape_of
from bench.timing import compare
from pallas_kernels.shapes import CPU_SPEED, VOCABULARIES, Shape

ROWS, VOCABULARY, K, DTYPE = (
    CPU_SPEED.rows, CPU_SPEED.vocabulary, CPU_SPEED.k, CPU_SPEED.dtype,
)  # fmt: skip
# Two vocabularies that hardly differ make one point of a plot.
APART = [size for name, size in VOCABULARIES.items() if name != "Llama 3"]
SHAPES = tuple(
    dict.fromkeys(
        shape
        for shape in (
            *(Shape(ROWS, VOCABULARY, k, DTYPE) for k in (0, 1, 5, 20, 64, 128)),
            *(Shape(rows, VOCABULARY, K, DTYPE) for rows in (1, 4, 16, 64, 256)),
            *(Shape(ROWS, vocabulary, K, DTYPE) for vocabulary in APART),
        )
        if shape not in kernels.CPU_SHAPES
    )
)


def run(quick: bool) -> list[Comparison]:
    """`bench.kernels`; on a CPU also a copy and, unless `quick`, the sweep."""
    if jax.devices()[0].platform != "cpu":
        return kernels.run(quick)
    copy = measure_copy()
    found = kernels.run(quick) + ([] if quick else [kernels.measure(shape) for shape in SHAPES])
    return [copy, *(beside(one, copy.figures["copy"]["GB/s"]) for one in found)]


def measure_copy() -> Comparison:
    """The bandwidth of the memory: a copy of as many logits as the largest comparison has."""
    x = gpu_contenders.random_logits(CPU_SPEED, seed=0)
    copy = jax.jit(lambda x: -x)
    found = compare(
        f"copy of {x.nbytes >> 20} MiB",
        {"copy": lambda: jax.block_until_ready(copy(x))},  # type: ignore[no-untyped-call]
        check=None,
        settings={"device": jax.devices()[0].device_kind},
    )
    figures = {"copy": {"GB/s": 2 * x.nbytes / found["copy"].median / 1e9}}  # read and written
    return replace(found, suite="kernels", figures=figures)


def beside(one: Comparison, bandwidth: float) -> Comparison:
    """The comparison with each contender's logits a second, beside the copy's GB/s."""
    shape = shape_of(one)
    size = shape["rows"] * shape["vocabulary"] * jnp.dtype(shape["dtype"]).itemsize
    figures = {}
    for timing in one.timings:
        speed = size / timing.median / 1e9
        figures[timing.name] = {"GB/s": speed, "% of a copy": 100 * speed / bandwidth}
    return replace(one, figures=figures)
