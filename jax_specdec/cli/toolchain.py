"""The toolchain of this machine: the driver, ptxas, libdevice; and who holds its memory."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# The oldest drivers, by the release notes of CUDA: https://docs.nvidia.com/cuda
LEAST_DRIVERS = {"jax_cuda13_plugin": (13, 580), "jax_cuda12_plugin": (12, 525)}
NVIDIA_SMI_SECONDS = 20  # that nvidia-smi may take
HELD = 2048  # MiB: more than a driver takes for itself


class Toolchain(NamedTuple):
    """Paths are empty where there is none."""

    gpus: tuple[str, ...]  # "name, driver, MiB used, MiB in all", as nvidia-smi says it
    driver: str
    ptxas: str
    libdevice: str
    searched: tuple[str, ...]  # folders, in order
    holders: tuple[str, ...] = ()  # "pid, program, MiB": processes that hold memory of a GPU
    plugins: tuple[str, ...] = ()  # of `LEAST_DRIVERS`, those that are installed

    def lines(self) -> Iterator[str]:
        """A line for each thing that was looked for."""
        yield f"driver: {self.driver or 'none: nvidia-smi finds no GPU'}"
        for name, path in (("ptxas", self.ptxas), ("libdevice", self.libdevice)):
            yield f"{name}: {path or 'not found in ' + ', '.join(self.searched)}"

    def notes(self) -> Iterator[str]:
        """Notes on what may stand in the way of the GPU kernels, and the way out."""
        for cuda, least in map(LEAST_DRIVERS.__getitem__, self.plugins):
            number = self.driver.partition(".")[0]
            if number.isdigit() and int(number) < least:
                yield (
                    f"the driver {self.driver} is older than {least}, the least for CUDA {cuda}: "
                    "install a newer driver, or jax for an older CUDA"
                )
        for name, path in (("ptxas", self.ptxas), ("libdevice", self.libdevice)):
            if not path:
                yield (
                    f"there is no {name} in {', '.join(self.searched)}: install nvidia-cuda-nvcc "
                    "and nvidia-nvvm, or name CUDA's folder in CUDA_ROOT"
                )
        for holder in self.holders:
            yield f"another process holds memory of the GPU: {holder} (pid, program, memory)"
        for gpu in self.gpus if not self.holders else ():  # a container does not see who
            name, _, used, *_ = [*gpu.split(", "), "", "", ""]
            if used.partition(" ")[0].isdigit() and int(used.partition(" ")[0]) > HELD:
                yield f"{used} of the {name}'s memory are held, by a process that is not seen here"


def find_toolchain(folders: Sequence[Path] | None = None) -> Toolchain:
    """Look at this machine; no GPU is needed, and none is touched.

    Args:
      folders: CUDA's; None: where jax looks for them.
    """
    folders = list(_folders()) if folders is None else folders
    gpus = _nvidia_smi("--query-gpu=name,driver_version,memory.used,memory.total")
    return Toolchain(
        gpus=gpus,
        driver=gpus[0].split(", ")[1] if gpus and ", " in gpus[0] else "",
        ptxas=_first(folders, "bin/ptxas") or shutil.which("ptxas") or "",
        libdevice=_first(folders, "nvvm/libdevice/libdevice.10.bc"),
        searched=tuple(map(str, folders)),
        holders=_nvidia_smi("--query-compute-apps=pid,process_name,used_memory") if gpus else (),
        plugins=tuple(filter(importlib.util.find_spec, LEAST_DRIVERS)),
    )


def _folders() -> Iterator[Path]:
    """CUDA's folders, where jax looks for them."""
    if root := os.environ.get("CUDA_ROOT"):
        yield Path(root)
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield from (Path(place) / name for name in ("cu13", "cuda_nvcc"))
    yield Path("/usr/local/cuda")


def _first(folders: Sequence[Path], name: str) -> str:
    return next((str(folder / name) for folder in folders if (folder / name).is_file()), "")


def _nvidia_smi(query: str) -> tuple[str, ...]:
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
