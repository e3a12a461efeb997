"""How tests run the GPU kernels: interpreted on a CPU; on a GPU, where `bench.gpu_check` runs the
same tests, compiled.
"""

import jax

from pallas_kernels.mosaic_gpu import compat

ON_GPU = jax.default_backend() == "gpu"


def interpret():
    """What a kernel's `interpret` is: None on a GPU."""
    return None if ON_GPU else compat.interpret_params(detect_races=True)


def races_found():
    """Whether the last interpreted kernel had a race; on a GPU there is no telling."""
    return not ON_GPU and compat.races_found()
