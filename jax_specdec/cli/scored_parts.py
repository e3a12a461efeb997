"""A folder of Parquet files that an interrupted `jax-specdec score` continues.

It has one row a sequence: what a teacher's top K is kept in. pyarrow, pandas, polars, DuckDB and
Ray read it as one table. Each part is written under another name and renamed when it is whole. So a
run that was killed leaves whole parts, and loses what it had not written yet.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.cli.resumable import Output, foreign
from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.openai import joined_prompt
from jax_specdec.records.batch import PromptRows


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSequence:
    """The logprobs of n tokens, each given those before it.

    Attributes:
      id: names the sequence.
      digest: recognizes its tokens and what was asked, see `Prompt.digest`.
      token_ids: [n] int32; nothing predicts the first, so rows are those of `token_ids[1:]`.
      logprobs: [n - 1] float32; NaN in an invalid row.
      token_ranks: [n - 1] int32, 1 for the most likely token, 0 in an invalid row.
      topk_ids: [n - 1, K] int32, most likely first; -1 where fewer than K are finite.
      topk_logprobs: [n - 1, K] float32; -inf there.
    """

    id: str
    digest: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    token_ranks: NDArray[np.int32]
    topk_ids: NDArray[np.int32]
    topk_logprobs: NDArray[np.float32]

    @property
    def num_bytes(self) -> int:
        """Of its columns."""
        columns = (self.token_ids, self.logprobs, self.token_ranks, self.topk_ids)
        return sum(x.nbytes for x in columns) + self.topk_logprobs.nbytes


def scored_sequence(
    id: str, digest: str, prompt: Sequence[int], rows: Sequence[PromptRows], k: int
) -> ScoredSequence:
    """Join the rows of a prompt's records.

    Args:
      id, digest: as `ScoredSequence`.
      prompt: n token ids.
      rows: of all tokens but the first, in order.
      k: K of every row.

    Raises:
      ValueError: the rows are not those of the prompt.
    """
    token_ids = np.asarray(prompt, np.int32)
    found = joined_prompt(rows, k)
    if not np.array_equal(found.token_ids, token_ids[1:]):
        count = len(found.token_ids)
        raise ValueError(f"sequence {id!r}: {count} rows are not of its {len(prompt)} tokens")
    return ScoredSequence(
        id,
        digest,
        token_ids,
        np.ascontiguousarray(found.logprobs[:, 0]),
        found.token_ranks,
        found.topk_ids,
        np.ascontiguousarray(found.logprobs[:, 1:]),
    )


def sequences_table(sequences: Sequence[ScoredSequence], k: int) -> Any:
    """A `pyarrow.Table`, one row a sequence.

    The columns are `ScoredSequence`'s attributes: strings, lists of numbers, and for the top K
    lists of lists of exactly K; with K = 0 there are none of these.

    Args:
      sequences: as `scored_sequence` makes them, all of one K.
      k: K.
    """
    pa = pyarrow()

    def offsets(counts: list[int]) -> Any:
        return pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]), pa.int64())

    def lists(name: str) -> Any:
        arrays = [getattr(one, name) for one in sequences]
        dtype = np.float32 if name.endswith("logprobs") else np.int32
        inner = pa.array(np.concatenate([np.empty(0, dtype), *map(np.ravel, arrays)]))
        if name.startswith("topk"):
            inner = pa.FixedSizeListArray.from_arrays(inner, k)
        return pa.LargeListArray.from_arrays(offsets([len(x) for x in arrays]), inner)

    names = ["token_ids", "logprobs", "token_ranks", *(["topk_ids", "topk_logprobs"] if k else [])]
    columns = {name: lists(name) for name in names}
    ids = {
        "id": pa.array([one.id for one in sequences], pa.string()),
        "digest": pa.array([one.digest for one in sequences], pa.string()),
    }
    return pa.table(ids | columns)


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
