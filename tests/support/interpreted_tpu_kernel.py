"""How tests run the TPU kernel: interpreted on a CPU, in small chunks of a row.

Races, reads out of bounds and reads of memory that nothing was written to are looked for.
"""

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_gpu import compat
from tests.support import quick_compile
from tests.support.watched_interpreters import watched

CUT = (2, 4)  # columns of 128 tokens a turn, and a chunk
_NOTED = {"on_race": "warn"} if compat.JAX_VERSION >= (0, 12) else {}  # else jax 0.12 raises


def interpret(races=True, copied="on_wait"):
    """What the kernel's `interpret` is.

    To look for races takes time that grows with the square of the number of reads. A copy happens
    when it is waited for, so that too early a read finds nothing; or, "eager", when it starts.
    """
    return pltpu.InterpretParams(
        detect_races=races,
        dma_execution_mode=copied,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        vector_clock_size=256,
        **_NOTED,
    )


def run_interpreted(call, *arguments, cut=CUT, races=True):
    """call(*arguments, interpret=..., cut=...) as one program; fails where it has a race."""
    found, raced = run_watched(call, *arguments, cut=cut, races=races)
    assert not raced
    return found


def run_watched(call, *arguments, cut=CUT, races=True, copied="on_wait"):
    """The same results, and whether there was a race."""

    def program(*given):
        return call(*given, interpret=interpret(races, copied), cut=cut)

    program = jax.jit(program, compiler_options=quick_compile.OPTIONS)
    with watched() as raced:
        found = jax.block_until_ready(program(*arguments))
    return found, raced()
