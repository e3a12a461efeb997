"""How tests run the TPU kernel: interpreted on a CPU, in small chunks of a row.

Races, reads out of bounds and reads of memory that nothing was written to are looked for.
"""

import jax
from jax.experimental.pallas import tpu as pltpu

from tests.support import quick_compile

CUT = (2, 4)  # columns of 128 tokens a turn, and a chunk


def interpret(races=True):
    """What the kernel's `interpret` is.

    To look for races takes time that grows with the square of the number of reads.
    """
    return pltpu.InterpretParams(
        detect_races=races, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )


def run_interpreted(call, *arguments, cut=CUT, races=True):
    """call(*arguments, interpret=..., cut=...) as one program."""

    def program(*given):
        return call(*given, interpret=interpret(races), cut=cut)

    program = jax.jit(program, compiler_options=quick_compile.OPTIONS)
    return jax.block_until_ready(program(*arguments))
