"""Why a kernel cannot run: names, shapes and devices.

What the shapes forbid is known when a call is traced, what the devices forbid when it is lowered.
"""

from typing import Literal, NoReturn, get_args

import jax

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]

MIN_CAPABILITY = 9.0
MIN_VOCABULARY = 2048  # one block of the narrowest groups, see mosaic_gpu/schedule
MAX_LOGITS = 2**31 - 1
MAX_TPU_VOCABULARY = 2**19  # of which two units of rows take half of a v5p's VMEM


class DoesNotFit(NotImplementedError):
    """The memory of the chip that a program is lowered for is too small for a kernel."""


def check_name(implementation: str | None) -> None:
    """Raise ValueError if there is no implementation of this name; None is the choice of one."""
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r} is not known; choose one of "
            f"{', '.join(map(repr, get_args(Implementation)))} or None"
        )


def refuse(implementation: str, obstacle: str, cause: Exception | None = None) -> NoReturn:
    """Say why an implementation cannot run."""
    raise NotImplementedError(
        f"implementation = {implementation!r} cannot run: {obstacle}; use 'xla' or None"
    ) from cause


def tpu_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the TPU kernel cannot run on logits [N, V] on any TPU; None if it can."""
    if not all(isinstance(size, int) for size in logits.shape):
        return f"the shape {logits.shape} is symbolic, and a kernel's grid is not"
    if logits.shape[1] > MAX_TPU_VOCABULARY:
        return f"rows of {logits.shape[1]} logits do not fit VMEM ({MAX_TPU_VOCABULARY} do)"
    return None


def cannot_run(logits: jax.Array | jax.ShapeDtypeStruct, capability: float | None) -> str | None:
    """Why the GPU kernels cannot run on these logits and this device; None if they can.

    Args:
      logits: [N, V].
      capability: the device's CUDA compute capability, None without a CUDA device.
    """
    if capability is None:
        return "there is no CUDA device here"
    return capability_obstacle(capability) or shape_obstacle(logits)


def capability_obstacle(capability: float) -> str | None:
    """Why the GPU kernels cannot run on a CUDA device of this compute capability."""
    if capability < MIN_CAPABILITY:  # not tried and caught: compiling for one aborts the process
        return f"the device has compute capability {capability}, {MIN_CAPABILITY} is the least"
    return None


def device_obstacle() -> str | None:
    """Why the GPU kernels cannot run on this host's CUDA devices; None without any."""
    capability = cuda_capability()  # None: the program is made for another host
    return None if capability is None else capability_obstacle(capability)


def shape_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the GPU kernels cannot run on logits of this shape [N, V] on any device."""
    if not all(isinstance(size, int) for size in logits.shape):
        return f"the shape {logits.shape} is symbolic, and a kernel's grid is not"
    if logits.size > MAX_LOGITS:
        return f"{logits.size} logits are more than a 32-bit index reaches ({MAX_LOGITS})"
    if logits.shape[1] < MIN_VOCABULARY:
        return f"a vocabulary of {logits.shape[1]} is less than one block of {MIN_VOCABULARY}"
    return None


def cuda_capability() -> float | None:
    """The lowest compute capability of this process's CUDA devices; None without any."""
    if jax.default_backend() != "gpu":
        return None
    found = [getattr(device, "compute_capability", None) for device in jax.local_devices()]
    # AMD's devices are "gpu" too; theirs reads like "gfx942".
    numbers = [float(c) for c in found if c is not None and str(c).replace(".", "").isdigit()]
    return min(numbers, default=None)
