"""How tests run the GPU kernels: interpreted on a CPU; on a GPU, where `bench.gpu_check` runs the
same tests, compiled.
"""

import jax

from pallas_kernels.mosaic_gpu import compat

ON_GPU = jax.default_backend() == "gpu"


def interpret():
    """What a kernel's `interpret` is: None on a GPU."""
    return None if ON_GPU else compat.interpret_params(detect_races=True)


# The interpreter makes long programs that run once, and whose callbacks keep them out of the
# compilation cache. Without optimization they compile in a quarter of the time.
UNOPTIMIZED = {"xla_backend_optimization_level": 0}
if compat.VERSION < (0, 11):  # where the second option is known to exist
    UNOPTIMIZED["xla_cpu_use_fusion_emitters"] = False


def run_without_races(call, *arguments):
    """call(*arguments, interpret=...) as one program; fails where its last kernel has a race."""
    options = None if ON_GPU else UNOPTIMIZED
    program = jax.jit(lambda *given: call(*given, interpret=interpret()), compiler_options=options)
    found = jax.block_until_ready(program(*arguments))
    assert ON_GPU or not compat.races_found()
    return found
