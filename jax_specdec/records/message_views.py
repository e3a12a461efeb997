"""The places of a step's records in their message, looked up once for all of them.

Who reads the records one by one would otherwise look into six columns for each array of each
record, which costs more than the views themselves.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records.decode import Message


@dataclass(frozen=True, slots=True, eq=False)
class MessageViews:
    """Where the values of N records are; views of the message's memory.

    Attributes:
      tokens: [N] the place of each record's n tokens in `token_ids`.
      rows: [N] of their n rows in `token_ranks`, `logprobs` and `topk_ids`; None without rows.
      token_ids: [T] int32; token_ranks: [R] int32.
      logprobs: [R, width] float32, topk_ids: [R, K] int32; None where rows differ in their widths.
    """

    tokens: list[slice]
    rows: list[slice | None]
    token_ids: NDArray[np.int32]
    token_ranks: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    topk_ids: NDArray[np.int32] | None

    @classmethod
    def of(
        cls, message: Message, slots: NDArray[np.int64], num_tokens: NDArray[np.int64]
    ) -> "MessageViews":
        """The places of the first `num_tokens` [N] tokens of `slots` [N]."""
        starts, row_starts = message.token_start[slots], message.row_start[slots]
        asked = message.columns[slots] > 0
        tokens = _slices(starts, num_tokens)
        rows: list[slice | None] = [*tokens]
        if not np.array_equal(starts, row_starts):
            rows = [*_slices(row_starts, num_tokens)]
        if not asked.all():
            rows = [place if has else None for place, has in zip(rows, asked.tolist(), strict=True)]
        return cls(tokens, rows, message.token_ids, message.token_ranks, *_tables(message))


def _slices(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> list[slice]:
    return list(map(slice, starts.tolist(), (starts + counts).tolist()))


def _tables(message: Message) -> tuple[NDArray[np.float32] | None, NDArray[np.int32] | None]:
    """The logprobs and the top-K ids of all rows, where all have as many."""
    num_rows = len(message.token_ranks)
    if not num_rows:
        return None, None
    columns, more = message.columns[message.num_rows > 0], message.num_more
    if (columns != columns[0]).any() or more.any():
        return None, None
    return message.logprobs.reshape(num_rows, -1), message.topk_ids.reshape(num_rows, -1)
