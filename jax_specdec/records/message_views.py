"""The arrays of a step's records, cut out of their message at once.

Who reads the records one by one would otherwise look into six columns for each array of each
record, which costs more than the views themselves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records.decode import Message
from jax_specdec.records.slot_fields import all_equal


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
        alike, count = message.same_columns, _same_count(message, num_tokens)
        if alike is not None and count:
            shape = (len(slots), count)
            token_ids = list(message.token_ids.reshape(shape))
            if not alike:
                return cls(token_ids, none, none, none)
            return cls(
                token_ids,
                list(message.token_ranks.reshape(shape)),
                list(message.logprobs.reshape(*shape, alike)),
                list(message.topk_ids.reshape(*shape, alike - 1)),
            )
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


def _where(has_rows: list[bool], views: list[Any]) -> list[Any]:
    return (
        views
        if all(has_rows)
        else [v if has else None for v, has in zip(views, has_rows, strict=True)]
    )


def _same_count(message: Message, num_tokens: NDArray[np.int64]) -> int:
    """How many tokens each record has, where all have as many and no token is left out; else 0.

    So are the steps without drafts: NumPy cuts such a table by itself.
    """
    count = len(message.token_ids) // max(len(num_tokens), 1)
    is_whole = count * len(num_tokens) == len(message.token_ids)
    if not is_whole or num_tokens.tobytes() != all_equal(count, len(num_tokens)).tobytes():
        return 0
    return count


def _slices(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> list[slice]:
    return list(map(slice, starts.tolist(), (starts + counts).tolist()))


def _cut(values: NDArray[Any], places: list[slice]) -> list[Any]:
    return list(map(values.__getitem__, places))
