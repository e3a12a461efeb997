"""The results of a session on a GPU: written after every piece, continued by the next call.

A loan of a GPU may end at any moment. So the work is cut into pieces of seconds to a minute. Each
is timed and announced, and a failure does not stop the others. A call that finds the file of an
earlier one does only what is left.
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

CHECKS = "checks"  # a key of the file's environment: seconds of each piece


@dataclass(frozen=True)
class Piece:
    """A part of the work: `run` returns a comparison to keep, or None if it only checks."""

    name: str
    run: Callable[[], Comparison | None]


@dataclass
class Journal:
    """The file and its content. A failed piece is not in it, so that the next call tries again."""

    path: Path
    environment: Mapping[str, Any]
    checks: dict[str, float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def work(self, pieces: Iterable[Piece], seconds: float) -> int:
        """Do the pieces that are not done yet; returns how many are left.

        Args:
          pieces: in order.
          seconds: no piece begins after this time; one that has begun is finished.
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
            except Exception as error:  # reported; the others continue
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
        """Write the file, whole or not at all if the machine stops meanwhile."""
        new = self.path.with_suffix(".new")
        write_json(new, self.comparisons, {**self.environment, CHECKS: self.checks})
        new.replace(self.path)


def opened(path: Path, environment: Mapping[str, Any], afresh: bool) -> Journal:
    """The journal of this file, with the results of an earlier call unless `afresh`.

    Raises:
      ValueError: the file comes from another device.
    """
    if afresh or not path.exists():
        return Journal(path, environment)
    earlier = read_json(path)
    if earlier.environment.get("device") != environment["device"]:
        raise ValueError(
            f"{path} was measured on {earlier.environment.get('device')}, and this is "
            f"{environment['device']}: choose another folder with --results, or pass --afresh"
        )
    checks = dict(earlier.environment.get(CHECKS, {}))
    return Journal(path, earlier.environment, checks, list(earlier.comparisons))
