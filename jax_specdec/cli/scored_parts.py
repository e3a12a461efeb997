"""A folder of Parquet files that an interrupted `jax-specdec score` continues.

Each part is written under another name and renamed when it is whole. So a run that was killed
leaves whole parts, and loses what it had not written yet.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from jax_specdec.cli.resumable_jsonl import OutputError, lock
from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.scored_sequences import ScoredSequence, sequences_table

PARTS = "part-*.parquet"
LOCK = ".lock"  # what begins with a dot is no part to those who read the folder
MAX_PART_BYTES = 64 << 20  # of columns in memory; then they are written


class ScoredParts:
    """Adds sequences to a folder, from one process at a time.

    Attributes:
      done: id to digest of the sequences in the folder.
    """

    def __init__(self, folder: Path, k: int) -> None:
        """Open or create the folder, and read what it has.

        Args:
          folder: of the parts.
          k: K of the sequences to come.

        Raises:
          OSError: the folder cannot be written.
          OutputError: another process writes it, or a part is not one of this command.
          ModuleNotFoundError: pyarrow is not installed.
        """
        self._parquet = pyarrow("pyarrow.parquet")
        self._folder, self._k = folder, k
        self._waiting: list[ScoredSequence] = []
        self._bytes = 0
        self.done: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / LOCK).open("a")
        try:
            lock(self._lock, folder)
            self._next = self._read()
        except BaseException:
            self._lock.close()
            raise

    def add(self, sequence: ScoredSequence) -> bool:
        """Take a sequence; says whether a part was written.

        Raises:
          OSError: the part cannot be written; it is kept, and written with the next one.
        """
        self._waiting.append(sequence)
        self._bytes += sequence.num_bytes
        if self._bytes < MAX_PART_BYTES:
            return False
        self.write()
        return True

    def write(self) -> None:
        """Write the sequences that wait, if there are some, as one part.

        Raises:
          OSError: the part cannot be written.
        """
        if not self._waiting:
            return
        part = self._folder / PARTS.replace("*", f"{self._next:05d}")
        half = part.with_name(f".{part.stem}")
        self._parquet.write_table(sequences_table(self._waiting, self._k), half)
        with half.open("rb") as file:
            os.fsync(file.fileno())
        half.rename(part)
        self._next += 1
        self.done |= {one.id: one.digest for one in self._waiting}
        self._waiting, self._bytes = [], 0

    def close(self) -> None:
        """Let another process write the folder; what waits is lost."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> int:
        """Learn what is done; returns the number of the next part."""
        number = 0
        for part in sorted(self._folder.glob(PARTS)):
            try:
                table = self._parquet.read_table(part, columns=["id", "digest"])
                number = int(part.stem.removeprefix(PARTS.partition("*")[0]))
                pairs = zip(table["id"].to_pylist(), table["digest"].to_pylist(), strict=True)
                self.done |= dict(pairs)
            except (ValueError, KeyError) as error:  # pyarrow's errors are ValueErrors
                raise OutputError(
                    f"{part} is not a part of this command: choose another folder, or remove it"
                ) from error
        return number + 1
