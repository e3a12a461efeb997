"""Which devices each worker computes on: no two of them share one unless they are told to.

An accelerator is given to a process by an environment variable that its runtime reads, such as
CUDA_VISIBLE_DEVICES: other processes' devices do not exist for it. CPU devices are the process's
own; where a process has several, each worker uses others of them. The engine finds
accelerators by their files in /dev.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# The variable, and the files in /dev that stand for a device each.
_KINDS = (
    ("CUDA_VISIBLE_DEVICES", "nvidia[0-9]*"),
    ("HIP_VISIBLE_DEVICES", "dri/renderD*"),
    ("TPU_VISIBLE_CHIPS", "accel[0-9]*"),
)
_NEEDS = {"HIP_VISIBLE_DEVICES": "kfd"}  # or the render nodes are those of a screen
_FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


@dataclass(frozen=True)
class Share:
    """The devices of one worker.

    Attributes:
      environment: what its process gets beside the engine's environment.
      local_devices: places in its `jax.local_devices()`; empty for all, from the first one.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    local_devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.local_devices:
            return "local devices " + ", ".join(map(str, self.local_devices))
        return " ".join(f"{name}={value}" for name, value in self.environment.items())


def shares(
    num_workers: int,
    devices_each: int,
    environment: Mapping[str, str],
    *,
    named: Sequence[str] = (),
    processes: bool = False,
    files: Path = Path("/dev"),
) -> tuple[Share, ...]:
    """The devices of each worker, in order; empty shares where there are no accelerators.

    Args:
      num_workers: that will run at once.
      devices_each: devices that one of them computes on.
      environment: the engine's own; it may see only some of the devices itself.
      named: the devices to share out, as the variable names them; empty for all that are found.
      processes: each device of a worker has a process of its own; with a CPU device of its own.
      files: where the devices have files.

    Raises:
      ValueError: there are too few of them; says how many there are, and the ways out.
    """
    accelerators = _accelerators(environment, files)
    if named:
        # Without files (in a container perhaps) the most usual kind is meant.
        accelerators = (accelerators[0] if accelerators else _KINDS[0][0]), tuple(named)
    if accelerators is None:
        return _cpu_shares(num_workers, devices_each, {} if processes else environment)
    variable, names = accelerators
    number = num_workers * devices_each
    if len(names) < number:
        raise ValueError(
            f"{num_workers} workers of {devices_each} device(s) each need {number}, and there "
            f"are {len(names)} ({variable}: {', '.join(names)}): lower num_ranks, "
            "num_prefill_ranks or tensor_parallel, or name a device several times in "
            "EngineConfig.devices where workers shall share it, or set JAX_PLATFORMS=cpu"
        )
    return tuple(
        Share({variable: ",".join(names[worker * devices_each : (worker + 1) * devices_each])})
        for worker in range(num_workers)
    )


def _accelerators(
    environment: Mapping[str, str], files: Path
) -> tuple[str, tuple[str, ...]] | None:
    """The variable that gives devices to a process, and the devices; None without accelerators."""
    if environment.get("JAX_PLATFORMS", "") == "cpu":
        return None
    for variable, pattern in _KINDS:
        if (visible := environment.get(variable)) is not None:
            names = tuple(filter(None, (name.strip() for name in visible.split(","))))
            if names and names != ("-1",):  # CUDA's way to say that there are none
                return variable, names
            continue
        usable = (files / _NEEDS.get(variable, "")).exists()
        if usable and (count := len(list(files.glob(pattern)))):
            return variable, tuple(map(str, range(count)))
    return None


def _cpu_shares(
    num_workers: int, devices_each: int, environment: Mapping[str, str]
) -> tuple[Share, ...]:
    """Shares of the CPU devices that XLA_FLAGS asks for in every process, if there are enough."""
    forced = _FORCED.findall(environment.get("XLA_FLAGS", ""))
    if not forced or int(forced[-1]) < num_workers * devices_each:
        return (Share(),) * num_workers
    return tuple(
        Share(local_devices=tuple(range(worker * devices_each, (worker + 1) * devices_each)))
        for worker in range(num_workers)
    )
