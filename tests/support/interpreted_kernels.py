"""How tests run the GPU kernels: interpreted on a CPU, compiled on a GPU."""

import jax
from jax.interpreters import mlir

from pallas_kernels.backends.mosaic_gpu import compat
from tests.support import quick_compile
from tests.support.watched_interpreters import watched

ON_GPU = jax.default_backend() == "gpu"


def interpret_params():
    """What `GPU.kernel(interpret=...)` takes to run a kernel on a CPU; races are noted."""
    # Copies by one of these threads would count as one after the other.
    options = {"detect_races": True, "num_tma_threads_per_device": 16}
    if compat.VERSION >= (0, 12):
        return compat.GPU.InterpretGPUParams(on_race="warn", **options)
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # These versions of jax lack a rule for `layout_cast` on a CPU, where it means nothing.
    mlir.register_lowering(layout_cast_p, lambda _, x, **__: [x], platform="cpu")
    return InterpretGPUParams(**options)


def interpret():
    """What a kernel's `interpret` is: None on a GPU."""
    return None if ON_GPU else interpret_params()


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
