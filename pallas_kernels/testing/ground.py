"""The ground of a device's check, as a line of JSON: device, backend, versions, the pieces.

    python -m pallas_kernels.testing.ground [--full] [--rehearse]

It is the first process of `jax-specdec check-device` that imports jax, and ends with what jax says
where that finds no device.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.backends import proved
from pallas_kernels.backends.mosaic_gpu.limits import capability_obstacle, cuda_capability
from pallas_kernels.testing import checks, peers, pieces
from pallas_kernels.testing.pieces import parts_of

_VERSIONS = ("jax-specdec", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu",
            "torch", "flashinfer-python", "vllm", "tokamax", "numpy")  # fmt: skip
# XLA's draw is not a job of the chooser: nothing stands in for the kernel that draws.
BY_XLA = "mosaic_gpu", [part for part in parts_of("mosaic_gpu") if part != "draws"]


def facts(full: bool, rehearsed: tuple[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """The facts; `obstacle` says why no kernels can run on the device, if so.

    rehearsed: in a rehearsal, the backend and the parts that stand-ins can do.
    """
    device = jax.local_devices()[0]
    backend = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}.get(jax.default_backend(), "")
    obstacle = None if backend else f"jax finds no GPU and no TPU here{_why()}"
    capability = cuda_capability()
    if backend == "mosaic_gpu":
        if capability is None:
            obstacle = f"{device.device_kind} is no CUDA device"
        else:
            obstacle = capability_obstacle(capability)
    parts: Sequence[str] = parts_of(backend)
    if rehearsed is not None:
        obstacle, (backend, parts) = None, rehearsed
    kernels: Any = checks.by_name(backend) if backend else None  # type: ignore[arg-type]
    is_small = rehearsed is not None

    def names(full: bool) -> dict[str, list[str]]:
        how = {"full": full, "rehearse": is_small}
        return {
            part: [piece.name for piece in pieces.pieces_of(part, kernels, backend, **how)]
            for part in parts
        }

    return {
        "device": device.device_kind,
        "backend": backend,
        "obstacle": obstacle,
        "compute capability": capability,
        "devices": len(jax.local_devices()),
        "memory": (device.memory_stats() or {}).get("bytes_limit"),
        "versions": {"python": platform.python_version()} | _versions(),
        "kernels": {
            part: pieces.CHECK_PARTS[part].kernel for part in parts if part in pieces.CHECK_PARTS
        },
        "pieces": names(full),
        "full": names(full=True),
        "missing": peers.missing(backend),
        "proofs": [] if rehearsed is not None else proofs(backend, device.device_kind),
    }


def proofs(backend: str, kind: str) -> list[dict[str, Any]]:
    """The proofs by a check of all of a job's parts, for each job of the backend."""
    return [
        proved.Proof(kind, proved.minor_version(), backend, job, proved.kernel_digest(backend, job))
        ._asdict() | {"parts": [part for part in proved.PARTS[job] if part in parts_of(backend)]}
        for job in proved.JOBS.get(backend, ())
    ]  # fmt: skip


def _why() -> str:
    """Words of jax on a platform that is installed and does not start."""
    for name in ("cuda", "tpu") if importlib.util.find_spec("libtpu") else ("cuda",):
        try:
            jax.devices(name)
        except RuntimeError as error:
            if "failed to initialize" in str(error):
                return f": {' '.join(str(error).split())[:400]}"
    return ""


def _versions() -> dict[str, str]:
    versions = {}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = (_of_checkout() if name == _VERSIONS[0] else None) or "NOT INSTALLED"
    return versions


def _of_checkout() -> str | None:
    """The version of the checkout that this file is in, if it is in one."""
    try:
        with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
            project = tomllib.load(file)["project"]
        return f"{project['version']} (a checkout)" if project["name"] == _VERSIONS[0] else None
    except (OSError, ValueError, LookupError):
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    print(json.dumps(facts(options.full, BY_XLA if options.rehearse else None)))
    sys.exit(0)
