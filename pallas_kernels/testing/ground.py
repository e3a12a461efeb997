"""What a check of a device stands on, as a line of JSON: device, backend, versions, the pieces.

    python -m pallas_kernels.testing.ground [--full] [--rehearse]

It is the first process of `jax-specdec check-device` that imports jax, and ends with what jax says
where that finds no device.
"""

import argparse
import importlib.metadata
import json
import platform
import sys
from typing import Any

import jax

from pallas_kernels.lowering import obstacles
from pallas_kernels.testing import checks, pieces

VERSIONS = ("jax-specdec", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu",
            "torch", "flashinfer-python", "vllm", "tokamax", "numpy")  # fmt: skip


def found(full: bool, rehearse: bool) -> dict[str, Any]:
    """The facts; `obstacle` says why no kernels can run on the device, if so."""
    device = jax.local_devices()[0]
    backend = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}.get(jax.default_backend(), "")
    obstacle = None if backend else "jax finds no GPU and no TPU here"
    capability = obstacles.cuda_capability()
    if backend == "mosaic_gpu":
        if capability is None:
            obstacle = f"{device.device_kind} is no CUDA device"
        else:
            obstacle = obstacles.capability_obstacle(capability)
    backend = "mosaic_gpu" if rehearse else backend
    kernels: Any = checks.by_name(backend) if backend else None  # type: ignore[arg-type]
    listed = {
        part: [
            piece.name
            for piece in pieces.pieces_of(part, kernels, backend, full=full, rehearse=rehearse)
        ]
        for part in (*pieces.PARTS, pieces.TIMES)
        if part == pieces.TIMES or backend in pieces.PARTS[part].backends
        if part != "draws" or not rehearse  # XLA's draw is not a job of the chooser
    }
    stats = None if rehearse else device.memory_stats()
    return {
        "device": device.device_kind,
        "backend": backend,
        "obstacle": None if rehearse else obstacle,
        "compute capability": capability,
        "devices": len(jax.local_devices()),
        "memory": (stats or {}).get("bytes_limit"),
        "versions": {"python": platform.python_version()} | _versions(),
        "kernels": {part: one.kernel for part, one in pieces.PARTS.items()},
        "pieces": listed,
    }


def _versions() -> dict[str, str]:
    here = {}
    for name in VERSIONS:
        try:
            here[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            here[name] = "NOT INSTALLED"
    return here


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    print(json.dumps(found(options.full, options.rehearse)))
    sys.exit(0)
