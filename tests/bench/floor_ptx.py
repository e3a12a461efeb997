"""The benchmark's floor, executed from its PTX as the kernels are: a part of `.ci/heavy ptx`."""

import sys

import jax.numpy as jnp
import numpy as np

from bench.gpu import floor
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule
from tests.pallas_kernels.mosaic_gpu.ptx import run_kernels
from tests.pallas_kernels.mosaic_gpu.ptx.cases import Case, edge_rows


def floor_case(name: str, schedule: Schedule) -> Case:
    """The maxima of rows with every edge of the contract."""
    x = edge_rows(schedule)
    expected = x.astype(np.float32).max(axis=1)  # NaN where there is one

    def check(actual: object) -> None:
        # The maximum over programs is XLA's on a CPU, which may flush subnormals.
        np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=2.0**-126)

    return Case(
        name,
        schedule,
        0,
        len(x),
        lambda: floor.row_maxima(schedule, jnp.asarray(x)),
        check,
        (floor,),
    )


CASES = [
    lambda: floor_case("floor", Schedule(8448, "bfloat16", 256, 2, 1)),
    lambda: floor_case("floor, odd", Schedule(8195, "float32", 256, 1, 1)),
]

if __name__ == "__main__":
    sys.exit(run_kernels.execute_all(CASES))
