"""What was compiled before, in a file: a run that was cut short goes on, and parts make a whole.

A result counts for the very sources and the very compiler that it was made of.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from bench.tpu.programs import Compiled

ROOT = Path(__file__).parent.parent.parent
KERNELS = Path("pallas_kernels/backends/mosaic_tpu")
OF_GPUS = Path("pallas_kernels/backends/mosaic_gpu")
COMPILERS = ("jax", "jaxlib", "libtpu")


def fingerprint(way: str, root: Path = ROOT) -> str:
    """What a way's results depend on: the compiler's versions, and the sources."""
    found = hashlib.sha256()
    for package in COMPILERS:
        found.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for path in sources(way, root):
        found.update(f"{path}\n".encode() + (root / path).read_bytes())
    return found.hexdigest()[:16]


def sources(way: str, root: Path) -> Iterable[Path]:
    """The files of a way, from the root: those of other chips' kernels do not count.

    Of the plain way none is ours but its own.
    """
    yield from map(
        Path, ("bench/tpu/programs.py", "bench/tpu/bundles.py", "pallas_kernels/testing/plain.py")
    )
    if way == "plain":
        return
    for path in sorted((root / "pallas_kernels").rglob("*.py")):
        found = path.relative_to(root)
        others = {OF_GPUS, KERNELS} if way == "xla" else {OF_GPUS}
        if others.isdisjoint(found.parents):
            yield found


class Results:
    """Lines of a file, each a program that was compiled."""

    def __init__(self, path: Path | None, ways: Iterable[str]) -> None:
        self.path = path
        self.fingerprints = {way: fingerprint(way) for way in ways} if path else {}

    def read(self) -> list[Compiled]:
        """What was compiled of the sources of now."""
        if self.path is None or not self.path.exists():
            return []
        lines = self.path.read_text().splitlines()
        return [one for line in lines if (one := self._result(line)) is not None]

    def _result(self, line: str) -> Compiled | None:
        try:
            of, values = json.loads(line)
        except ValueError:  # a run was stopped while it wrote
            return None
        return Compiled(**values) if of == self.fingerprints.get(values["way"]) else None

    def add(self, one: Compiled) -> None:
        """Write a result down."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write("\n" + json.dumps([self.fingerprints[one.way], asdict(one)]) + "\n")
