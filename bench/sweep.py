"""What K, the batch and the vocabulary each cost on a CPU: one of them changed at a time.

On a GPU `bench.gpu_kernels` measures a whole grid of shapes; this is the part of it that a CPU can
do in half a minute.
"""

import jax

from bench import kernels
from bench.timing import Comparison
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
    """Every shape that `bench.kernels` does not measure already; none where it would be slow."""
    if quick or jax.devices()[0].platform != "cpu":
        return []
    return [kernels.measure(shape) for shape in SHAPES]
