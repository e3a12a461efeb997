"""Directories of engines that were killed: found, and removed.

An engine has a directory for its socket and its workers' output, and removes it when it is closed,
except for the output of lost workers. A file in it says whose it is.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ipc import doctor
from jax_specdec.engine.last_words import LOST
from jax_specdec.wording import pluralize

DIRECTORY_PREFIX = "jax-specdec-"
LINE_BYTES = 1 << 18  # at the end of an output, in which the line of a loss is looked for
_LOSS = re.compile(rf"\d{{4}}-\d\d-\d\dT\S+ {LOST}")
OWNER = "engine"  # the file that names the engine's process


@dataclass(frozen=True)
class StaleDirectory:
    """A directory of an engine's.

    Attributes:
      path: the directory.
      size: bytes of the files in it.
      state: of the engine's process; "dead" means that the directory may be removed.
      outputs: files with what workers printed.
      losses: the file of each worker that was lost, and when and why it was.
    """

    path: Path
    size: int
    state: doctor.SegmentState
    outputs: int
    losses: tuple[tuple[str, str], ...] = ()

    def line(self, state: str) -> str:
        """The directory in a list, with its state or what has become of it."""
        return f"{state:16} {self.size:>12,} B  {pluralize(self.outputs, 'output'):12} {self.path}"


def mark_owner(folder: Path) -> None:
    """Note in a new directory that it belongs to this process."""
    (folder / OWNER).write_text(doctor.this_process())


def find_leftovers(directory: Path | None = None) -> list[StaleDirectory]:
    """The directories of engines, sorted by path.

    Args:
      directory: where they are; None for the system's temporary directory.

    Raises:
      RingError: the operating system does not say which processes live.
    """
    leftovers = []
    for path in sorted((directory or Path(tempfile.gettempdir())).glob(f"{DIRECTORY_PREFIX}*")):
        try:
            owner = path / OWNER
            state = doctor.state_of(owner.read_text(), owner.stat().st_uid)
            entries = list(path.iterdir())
            size = sum(entry.lstat().st_size for entry in entries)
        except (OSError, UnicodeDecodeError):  # no engine's, another user's, or it is gone by now
            continue
        if state is not None:
            outputs = sum(entry.suffix == ".log" for entry in entries)
            leftovers.append(StaleDirectory(path, size, state, outputs, tuple(_losses(entries))))
    return leftovers


def _losses(entries: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """The names of outputs that tell of a loss, and the line of it."""
    for entry in sorted(entries):
        if entry.suffix != ".log":
            continue
        with contextlib.suppress(OSError), entry.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LINE_BYTES, 0))
            # Processes that it had started may print behind it.
            lines = file.read().decode(errors="backslashreplace").splitlines()
            told = [line.rstrip() for line in lines if _LOSS.match(line)]
            if told:
                yield entry.name, told[-1]


def remove(leftovers: list[StaleDirectory]) -> list[StaleDirectory]:
    """Remove the directories of dead engines; returns those that are gone."""
    dead = [leftover for leftover in leftovers if leftover.state == "dead"]
    for leftover in dead:
        shutil.rmtree(leftover.path, ignore_errors=True)
    return [leftover for leftover in dead if not os.path.lexists(leftover.path)]
