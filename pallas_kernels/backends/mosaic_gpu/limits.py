"""Limits of the GPU kernels: shapes of logits, and CUDA devices."""

import jax

MIN_CAPABILITY = 8.0  # from jax 0.11 on: an A100
MIN_CAPABILITY_BEFORE = 9.0  # jax 0.10 emits instructions that older ones have not
WITH_CLUSTERS = 9.0
MIN_VOCABULARY = 2048  # one block of the narrowest groups, see schedule.py
MAX_LOGITS = 2**31 - 1


def cannot_run(logits: jax.Array | jax.ShapeDtypeStruct, capability: float | None) -> str | None:
    """Why the GPU kernels cannot run on these logits and this device; None if they can.

    Args:
      logits: [N, V].
      capability: the device's CUDA compute capability, None without a CUDA device.
    """
    if capability is None:
        return "there is no CUDA device here"
    return capability_obstacle(capability) or obstacle(logits)


def capability_obstacle(
    capability: float, version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why the GPU kernels cannot run on a CUDA device of this compute capability.

    version: of jax.
    """
    is_old = version < (0, 11)
    least = MIN_CAPABILITY_BEFORE if is_old else MIN_CAPABILITY
    if capability >= least:  # not tried and caught: compiling for others aborts the process
        return None
    said = f"the device has compute capability {capability}, {least} is the least"
    if is_old and capability >= MIN_CAPABILITY:
        said += f" with jax 0.10 ({MIN_CAPABILITY} with jax 0.11 and later)"
    return said


def has_clusters() -> bool:
    """Whether CTAs can be a cluster on what programs are lowered for: without a device, on 9.0."""
    capability = cuda_capability()
    return capability is None or capability >= WITH_CLUSTERS


def device_obstacle() -> str | None:
    """Why the GPU kernels cannot run on this host's CUDA devices; None without any."""
    capability = cuda_capability()  # None: the program is made for another host
    return None if capability is None else capability_obstacle(capability)


def obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
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


def is_faster(_: jax.Array, __: tuple[int, int] | None) -> bool:
    """Whether the kernels are faster than XLA: wherever they can run."""
    return True
