"""What a session on a GPU has found so far: written after every piece, taken up by the next call.

A loan of a GPU may end at any moment. So the work is cut into pieces of seconds to a minute, each
is timed and announced, one that fails does not stop the others, and a call that finds the file of
an earlier one only does what is left.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report.comparison import Comparison
from bench.report.files import read_json, write_json
from bench.timing import print_table

CHECKS = "checks"  # the key in the file's environment: seconds by piece


@dataclass(frozen=True)
class Piece:
    """A part of the work: `run` returns a comparison to keep, or None where it only checks."""

    name: str
    run: Callable[[], Comparison | None]


@dataclass
class Journal:
    """The file, and what is in it. A piece that failed is not in it: the next call tries again."""

    path: Path
    environment: Mapping[str, Any]
    checks: dict[str, float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def work(self, pieces: Iterable[Piece], seconds: float) -> int:
        """Do what is not done yet, for so long at most; returns how many pieces are left.

        A piece that has begun is finished, whatever the time.
        """
        begin = time.perf_counter()
        todo = [piece for piece in pieces if piece.name not in self.checks]
        for index, piece in enumerate(todo):
            started = time.perf_counter()
            if started - begin >= seconds:
                return len(todo) - index
            announce = f"[{started - begin:6.1f} s, {index + 1} of {len(todo)}] {piece.name}"
            print(f"{announce} ...", flush=True)
            try:
                found = piece.run()
            except Exception as error:  # reported, and the others go on
                traceback.print_exc()
                print(f"{announce}: FAILED", flush=True)
                self.failures.append(f"{piece.name}: {type(error).__name__}: {error}")
                continue
            took = time.perf_counter() - started
            self.checks[piece.name] = took
            if found is not None:
                self.comparisons.append(found)
                print_table([found], Console(width=150))
            self.save()
            print(f"{announce}: done in {took:.1f} s", flush=True)
        return 0

    def save(self) -> None:
        """Write the file; whole or not at all, should the machine stop meanwhile."""
        new = self.path.with_suffix(".new")
        write_json(new, self.comparisons, {**self.environment, CHECKS: self.checks})
        new.replace(self.path)


def opened(path: Path, environment: Mapping[str, Any], afresh: bool) -> Journal:
    """The journal of this file, with what an earlier call found unless `afresh`.

    Raises:
      ValueError: the file comes from another device.
    """
    if afresh or not path.exists():
        return Journal(path, environment)
    earlier = read_json(path)
    if earlier.environment.get("device") != environment["device"]:
        raise ValueError(
            f"{path} was measured on {earlier.environment.get('device')}, and this is "
            f"{environment['device']}: choose another folder, or begin afresh"
        )
    checks = dict(earlier.environment.get(CHECKS, {}))
    return Journal(path, earlier.environment, checks, list(earlier.comparisons))
