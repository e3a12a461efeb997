"""A folder of Parquet files that an interrupted `jax-specdec score` continues.

It has one row a sequence: what a teacher's top K is kept in. pyarrow, pandas, polars, DuckDB and
Ray read it as one table. Each part is written under another name and renamed when it is whole. So a
run that was killed leaves whole parts, and loses what it had not written yet.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.cli.resumable import Output, foreign
from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.openai import joined_prompt
from jax_specdec.records.batch import PromptRows


def scored_sequence(
    id: str, digest: str, prompt: Sequence[int], rows: Sequence[PromptRows], k: int
) -> Any:
    """A `pyarrow.Table` of one row: a sequence of n tokens and their logprobs.

    Its columns: `id`; `digest`; `token_ids` [n] int32; for `token_ids[1:]`, as nothing predicts the
    first, `logprobs` [n - 1] float32 (NaN in an invalid row) and `token_ranks` [n - 1] int32 (1 for
    the most likely token, 0 in an invalid row); and with K > 0 lists of exactly K, `topk_ids`
    [n - 1, K] int32 (most likely first; -1 where fewer than K are finite) and `topk_logprobs`
    [n - 1, K] float32 (-inf there).

    Args:
      id: names the sequence.
      digest: recognizes its tokens and what was asked, see `Prompt.digest`.
      prompt: n token ids.
      rows: of all tokens but the first, in order.
      k: K of every row.

    Raises:
      ValueError: the rows are not those of the prompt.
    """
    pa = pyarrow()
    token_ids, found = np.asarray(prompt, np.int32), joined_prompt(rows, k)
    if not np.array_equal(found.token_ids, token_ids[1:]):
        count = len(found.token_ids)
        raise ValueError(f"sequence {id!r}: {count} rows are not of its {len(prompt)} tokens")
    columns = {
        "token_ids": token_ids, "logprobs": found.logprobs[:, 0], "token_ranks": found.token_ranks,
    }  # fmt: skip
    if k:
        columns |= {"topk_ids": found.topk_ids, "topk_logprobs": found.logprobs[:, 1:]}

    def as_list(values: NDArray[Any]) -> Any:
        inner = pa.array(np.ravel(values))
        if values.ndim == 2:
            inner = pa.FixedSizeListArray.from_arrays(inner, k)
        return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), inner)

    lists = {name: as_list(values) for name, values in columns.items()}
    return pa.table({"id": pa.array([id]), "digest": pa.array([digest]), **lists})


PARTS = "part-*.parquet"
LOCK = ".lock"  # what begins with a dot is no part to those who read the folder
MAX_PART_BYTES = 64 << 20


class ScoredParts(Output):
    """A folder of sequences; what was added and not written is lost with the process."""

    def __init__(self, folder: Path, max_bytes: int = MAX_PART_BYTES) -> None:
        """Open or create the folder, and read what it has.

        Args:
          folder: of the parts.
          max_bytes: of columns that wait; then they are written.

        Raises:
          OSError, OutputError: as `Output`.
          ModuleNotFoundError: pyarrow is not installed.
        """
        self._parquet = pyarrow("pyarrow.parquet")
        self._max_bytes, self._bytes, self._next = max_bytes, 0, 1
        self._waiting: list[Any] = []
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, (folder / LOCK).open("a"))

    def add(self, sequence: Any) -> bool:
        """Take a `scored_sequence`, all of one K; says whether a part was written.

        Raises:
          OSError: the part cannot be written; it is kept, and written with the next one.
        """
        self._waiting.append(sequence)
        self._bytes += sequence.nbytes
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
        table = pyarrow().concat_tables(self._waiting).combine_chunks()
        self._parquet.write_table(table, half)
        with half.open("rb") as file:
            os.fsync(file.fileno())
        half.rename(part)
        self._next += 1
        self._learn(table)
        self._waiting, self._bytes = [], 0

    def _read(self) -> None:
        for part in sorted(self.path.glob(PARTS)):
            try:
                table = self._parquet.read_table(part, columns=["id", "digest"])
                self._next = int(part.stem.removeprefix(PARTS.partition("*")[0])) + 1
                self._learn(table)
            except (ValueError, KeyError) as error:  # pyarrow's errors are ValueErrors
                raise foreign(str(part)) from error

    def _learn(self, table: Any) -> None:
        """Note what is done by the sequences of a part."""
        pairs = zip(table["id"].to_pylist(), table["digest"].to_pylist(), strict=True)
        self.done |= dict(pairs)
