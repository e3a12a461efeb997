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
        none = [None] * len(slots)
        tokens = places = _slices_of(message, slots, num_tokens)
        token_ids, columns = _cut(message.token_ids, tokens), message.row_columns
        if columns == 0:
            return cls(token_ids, none, none, none)
        alike = message.same_columns is not None
        if not alike:
            row_starts = message.row_start[slots]
            if row_starts.tobytes() != message.token_start[slots].tobytes():
                places = _slices(row_starts, num_tokens)
        ranks = _cut(message.token_ranks, places)
        logprobs: list[Any] = none
        topk_ids: list[Any] = none
        if columns is not None:
            logprobs = _cut(message.logprobs.reshape(-1, columns), places)
            shape = len(message.token_ranks), columns - 1
            topk_ids = _cut(message.topk_ids.reshape(shape), places)
        if alike:
            return cls(token_ids, ranks, logprobs, topk_ids)
        has_rows = (message.columns[slots] > 0).tolist()
        return cls(token_ids, *(_where(has_rows, views) for views in (ranks, logprobs, topk_ids)))


def _where(has_rows: list[bool], views: list[Any]) -> list[Any]:
    return (
        views
        if all(has_rows)
        else [v if has else None for v, has in zip(views, has_rows, strict=True)]
    )


def _slices_of(
    message: Message, slots: NDArray[np.int64], num_tokens: NDArray[np.int64]
) -> list[slice]:
    """Where the tokens of `slots` lie in the message."""
    if num_tokens is not message.num_tokens:
        return _slices(message.token_start[slots], num_tokens)
    ends = list(accumulate(num_tokens.tolist(), initial=0))  # of all slots, and nothing is cut
    return list(map(slice, ends, ends[1:]))


def _slices(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> list[slice]:
    return list(map(slice, starts.tolist(), (starts + counts).tolist()))


def _cut(values: NDArray[Any], places: list[slice]) -> list[Any]:
    return list(map(values.__getitem__, places))
