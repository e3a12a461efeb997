"""The arrays of a step's records, cut out of their message at once.

Who reads the records one by one would otherwise look into six columns for each array of each
record, which costs more than the views themselves.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records.decode import Message


class MessageViews(NamedTuple):
    """The values of N records, each of n tokens; views of the message's memory.

    Attributes:
      token_ids: [N] of [n] int32.
      token_ranks: [N] of [n] int32; None without logprobs.
      logprobs: [N] of [n, width] float32, topk_ids: [N] of [n, K] int32; None without logprobs, and
        all of them where rows differ in their widths.
    """

    token_ids: list[NDArray[np.int32]]
    token_ranks: Sequence[NDArray[np.int32] | None]
    logprobs: Sequence[NDArray[np.float32] | None]
    topk_ids: Sequence[NDArray[np.int32] | None]

    @classmethod
    def of(
        cls, message: Message, slots: NDArray[np.int64], num_tokens: NDArray[np.int64]
    ) -> "MessageViews":
        """The first `num_tokens` [N] tokens of `slots` [N]."""
        alike = message.same_columns
        if alike is not None and num_tokens is message.num_tokens:  # of all slots, none cut
            return cls._of_alike(message, num_tokens.tolist(), alike)
        none = [None] * len(slots)
        starts, row_starts = message.token_start[slots], message.row_start[slots]
        tokens = places = _slices(starts, num_tokens)
        if row_starts.tobytes() != starts.tobytes():
            places = _slices(row_starts, num_tokens)
        token_ids, columns = _cut(message.token_ids, tokens), message.row_columns
        if columns == 0:
            return cls(token_ids, none, none, none)
        ranks = _cut(message.token_ranks, places)
        logprobs: list[Any] = none
        topk_ids: list[Any] = none
        if columns is not None:
            logprobs = _cut(message.logprobs.reshape(-1, columns), places)
            shape = len(message.token_ranks), columns - 1
            topk_ids = _cut(message.topk_ids.reshape(shape), places)
        has_rows = (message.columns[slots] > 0).tolist()
        return cls(token_ids, *(_where(has_rows, views) for views in (ranks, logprobs, topk_ids)))

    @classmethod
    def _of_alike(cls, message: Message, counts: list[int], columns: int) -> "MessageViews":
        """All `counts` [N] tokens of all slots, whose rows have as many columns."""
        number, first = len(counts), counts[0]
        none = [None] * number
        if counts.count(first) == number:  # a step without drafts: NumPy cuts it by itself
            shape = number, first
            token_ids = list(message.token_ids.reshape(shape))
            if not columns:
                return cls(token_ids, none, none, none)
            return cls(
                token_ids,
                list(message.token_ranks.reshape(shape)),
                list(message.logprobs.reshape(*shape, columns)),
                list(message.topk_ids.reshape(*shape, columns - 1)),
            )
        ends = list(accumulate(counts, initial=0))
        slices = list(map(slice, ends, ends[1:]))
        token_ids = list(map(message.token_ids.__getitem__, slices))
        if not columns:
            return cls(token_ids, none, none, none)
        total = ends[-1]
        return cls(
            token_ids,
            list(map(message.token_ranks.__getitem__, slices)),
            list(map(message.logprobs.reshape(total, columns).__getitem__, slices)),
            list(map(message.topk_ids.reshape(total, columns - 1).__getitem__, slices)),
        )


def _where(has_rows: list[bool], views: list[Any]) -> list[Any]:
    return (
        views
        if all(has_rows)
        else [v if has else None for v, has in zip(views, has_rows, strict=True)]
    )


def _slices(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> list[slice]:
    return list(map(slice, starts.tolist(), (starts + counts).tolist()))


def _cut(values: NDArray[Any], places: list[slice]) -> list[Any]:
    return list(map(values.__getitem__, places))
