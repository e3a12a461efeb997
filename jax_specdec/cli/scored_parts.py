"""A folder of Parquet files that an interrupted `jax-specdec score` continues.

Each part is written under another name and renamed when it is whole. So a run that was killed
leaves whole parts, and loses what it had not written yet.
"""

import os
from pathlib import Path

from jax_specdec.cli.resumable import Output, foreign
from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.scored_sequences import ScoredSequence, sequences_table

PARTS = "part-*.parquet"
LOCK = ".lock"  # what begins with a dot is no part to those who read the folder
MAX_PART_BYTES = 64 << 20


class ScoredParts(Output):
    """A folder of sequences; what was added and not written is lost with the process."""

    def __init__(self, folder: Path, k: int, max_bytes: int = MAX_PART_BYTES) -> None:
        """Open or create the folder, and read what it has.

        Args:
          folder: of the parts.
          k: K of the sequences to come.
          max_bytes: of columns that wait; then they are written.

        Raises:
          OSError, OutputError: as `Output`.
          ModuleNotFoundError: pyarrow is not installed.
        """
        self._parquet = pyarrow("pyarrow.parquet")
        self._k, self._max_bytes, self._bytes, self._next = k, max_bytes, 0, 1
        self._waiting: list[ScoredSequence] = []
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, (folder / LOCK).open("a"))

    def add(self, sequence: ScoredSequence) -> bool:
        """Take a sequence; says whether a part was written.

        Raises:
          OSError: the part cannot be written; it is kept, and written with the next one.
        """
        self._waiting.append(sequence)
        self._bytes += sequence.num_bytes
        if self._bytes < self._max_bytes:
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
        part = self.path / PARTS.replace("*", f"{self._next:05d}")
        half = part.with_name(f".{part.stem}")
        self._parquet.write_table(sequences_table(self._waiting, self._k), half)
        with half.open("rb") as file:
            os.fsync(file.fileno())
        half.rename(part)
        self._next += 1
        self.done |= {one.id: one.digest for one in self._waiting}
        self._waiting, self._bytes = [], 0

    def _read(self) -> None:
        for part in sorted(self.path.glob(PARTS)):
            try:
                table = self._parquet.read_table(part, columns=["id", "digest"])
                self._next = int(part.stem.removeprefix(PARTS.partition("*")[0])) + 1
                pairs = zip(table["id"].to_pylist(), table["digest"].to_pylist(), strict=True)
                self.done |= dict(pairs)
            except (ValueError, KeyError) as error:  # pyarrow's errors are ValueErrors
                raise foreign(str(part)) from error
