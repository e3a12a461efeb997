"""Scored prompts as columns, one row a sequence: what a teacher's top K is kept in.

A folder of Parquet files with these columns is read as one table by pyarrow, pandas, polars, DuckDB
and Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    found, ranks = joined_prompt(rows, k)
    if not np.array_equal(found.token_ids, token_ids[1:]):
        count = len(found.token_ids)
        raise ValueError(f"sequence {id!r}: {count} rows are not of its {len(prompt)} tokens")
    return ScoredSequence(
        id,
        digest,
        token_ids,
        np.ascontiguousarray(found.logprobs[:, 0]),
        ranks,
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
