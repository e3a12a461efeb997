"""Results as files: every figure with its machine, versions and settings."""

import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.comparison import Comparison, Target, Timing

PACKAGES = ("jax", "jaxlib", "numpy", "posix_ipc", "msgpack", "pyzmq", "iceoryx2", "tokenizers",
            "torch", "jax-specdec")  # fmt: skip


class ResultsError(ValueError):
    """A file holds no results; the text says why."""


@dataclass(frozen=True)
class Results:
    """One run of the benchmarks."""

    path: Path
    environment: Mapping[str, Any]
    comparisons: tuple[Comparison, ...]

    @property
    def date(self) -> str:
        """When the run began, in ISO format."""
        return str(self.environment["date"])


def environment() -> dict[str, Any]:
    """The machine, the versions and the command of this run."""
    path = Path(sys.argv[0])  # without the folders of this machine
    program = path.parent.name if path.name == "__main__.py" else path.stem
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "load before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
    }


def write_json(
    path: Path, comparisons: Sequence[Comparison], machine: Mapping[str, Any] | None = None
) -> None:
    """Write all comparisons with their machine (`environment()` by default)."""
    content = {
        "environment": dict(machine or environment()),
        "comparisons": [asdict(c) for c in comparisons],
    }
    # Floats have six digits: no clock here is better, and files stay small.
    rounded = json.loads(json.dumps(content), parse_float=lambda x: float(f"{float(x):.6g}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded, indent=1) + "\n")


def read_json(path: Path) -> Results:
    """Read what `write_json` wrote; a field that an old file lacks gets its default.

    Raises:
      ResultsError: the file holds no results.
    """
    try:
        content = json.loads(path.read_text())
        comparisons = tuple(_comparison(fields) for fields in content["comparisons"])
        machine = content["environment"]
        _ = machine["date"], machine["cpus"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(
            f"{path} holds no benchmark results ({error!r}): give a file that "
            "`python -m bench --json` wrote"
        ) from error
    return Results(path, machine, comparisons)


def _comparison(fields: dict[str, Any]) -> Comparison:
    timings = [Timing(**{**t, "rounds": tuple(t["rounds"])}) for t in fields.pop("timings")]
    for timing in timings:
        if not 0 < timing.median < math.inf:  # no ratio to it would exist
            raise ValueError(f"{timing.name!r} took {timing.median!r} s in {fields['title']!r}")
    targets = tuple(Target(**target) for target in fields.pop("targets", ()))
    return Comparison(timings=tuple(timings), targets=targets, **fields)


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor() or "unknown"
