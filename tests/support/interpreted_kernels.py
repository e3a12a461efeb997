"""How tests run the GPU kernels: interpreted on a CPU, compiled on a GPU."""

import jax

from pallas_kernels.backends.mosaic_gpu import compat
from tests.support import quick_compile
from tests.support.watched_interpreters import watched

ON_GPU = jax.default_backend() == "gpu"


def interpret():
    """What a kernel's `interpret` is: None on a GPU."""
    return None if ON_GPU else compat.interpret_params(detect_races=True)


def compiled(call):
    """call(*arguments, interpret=...) as one program.

    The interpreter makes long programs, whose callbacks keep them out of the compilation cache.
    """
    options = None if ON_GPU else quick_compile.OPTIONS
    return jax.jit(lambda *given: call(*given, interpret=interpret()), compiler_options=options)


def run_without_races(call, *arguments):
    """call(*arguments, interpret=...) as one program; fails where a kernel of it has a race."""
    return checked(compiled(call), *arguments)


def checked(program, *arguments):
    """program(*arguments), which is such a program; fails where a kernel of it has a race."""
    with watched() as raced:
        found = jax.block_until_ready(program(*arguments))
    assert not raced()
    return found
