"""How tests run the GPU kernels: interpreted on a CPU; on a GPU, where `bench.gpu_check` runs the
same tests, compiled.
"""

import jax

from pallas_kernels.mosaic_gpu import compat
from tests.support import quick_compile

ON_GPU = jax.default_backend() == "gpu"


def interpret():
    """What a kernel's `interpret` is: None on a GPU."""
    return None if ON_GPU else compat.interpret_params(detect_races=True)


def run_without_races(call, *arguments):
    """call(*arguments, interpret=...) as one program; fails where its last kernel has a race.

    The interpreter makes long programs, whose callbacks keep them out of the compilation cache.
    """
    options = None if ON_GPU else quick_compile.OPTIONS
    program = jax.jit(lambda *given: call(*given, interpret=interpret()), compiler_options=options)
    found = jax.block_until_ready(program(*arguments))
    assert ON_GPU or not compat.races_found()
    return found
