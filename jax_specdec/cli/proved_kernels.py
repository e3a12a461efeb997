"""This user's file of kernels that passed `check-device`, which calls take by default."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jax_specdec.compiled_programs import default_folder

PROOF_FIELDS = (
    "device",
    "jax",
    "backend",
    "job",
    "digest",
)  # of `pallas_kernels.backends.proved.Proof`
PROOFS_FILE = "proved-kernels.json"
DIGESTS_SECONDS = 60.0  # to import jax and read the kernels' sources

ProofEntry = dict[str, str]
Digests = dict[str, dict[str, str]]  # of the kernels of each job, by backend


def file() -> Path:
    """The file, beside the folder of kept programs; made by nobody yet perhaps."""
    return default_folder().parent / PROOFS_FILE


def read_proofs(path: Path) -> list[ProofEntry]:
    """The entries; none where the file is not there, or is none of ours."""
    try:
        return [
            {name: str(entry[name]) for name in PROOF_FIELDS}
            for entry in json.loads(path.read_text())
        ]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def update(path: Path, proofs: list[dict[str, Any]], passed: set[str], failed: set[str]) -> None:
    """Write what a check found; a whole file or none.

    An entry of the same device, version of jax and kernels is replaced by one that passed, and
    goes where the kernels failed.

    Args:
      path: of the file.
      proofs: an entry of each job of kernels that was checked.
      passed: the jobs whose entry counts from now on.
      failed: those whose entry goes.
    """
    checked = [{name: str(proof[name]) for name in PROOF_FIELDS} for proof in proofs]
    over = [_place(entry) for entry in checked if entry["job"] in passed | failed]
    before = read_proofs(path)
    entries = [entry for entry in before if _place(entry) not in over]
    entries += [entry for entry in checked if entry["job"] in passed]
    if entries == before:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def _place(entry: ProofEntry) -> tuple[str, ...]:
    """The fields of which there is one entry."""
    return tuple(entry[name] for name in PROOF_FIELDS[:-1])


def current_digests() -> Digests | None:
    """The digests of the kernels that are installed; None where that cannot be known: without jax.

    A process of its own imports jax.
    """
    command = [sys.executable, "-P", "-m", "pallas_kernels.testing.digests"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True,
            timeout=DIGESTS_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        digests: Digests = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return digests


def lines(path: Path, digests: Digests | None = None) -> list[str]:
    """A line for each device and version of jax: which kernels passed there.

    digests: of the kernels as they are, by which those that changed since are said to have; None:
      that is not known.
    """
    jobs: dict[tuple[str, str, str], list[str]] = {}
    for entry in read_proofs(path):
        backend, job = entry["backend"], entry["job"]
        counts = digests is None or digests.get(backend, {}).get(job) == entry["digest"]
        label = job if counts else f"{job} (changed since: XLA computes it)"
        jobs.setdefault((entry["device"], entry["jax"], backend), []).append(label)
    return [
        f"proved kernels: {backend} on {device} with jax {version}: {', '.join(names)}"
        for (device, version, backend), names in jobs.items()
    ]
