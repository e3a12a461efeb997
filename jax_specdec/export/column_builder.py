"""Records as columns for training on logprobs: one row a token, NumPy, nothing lost.

`ColumnBuilder` collects the records of many requests, and `TokenColumns` is the result; `arrow.py`
makes Arrow tables and Parquet files of it.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.openai_extension import token_kinds
from jax_specdec.export.token_columns import (
    KINDS,
    NOT_ASKED,
    TOKEN_COLUMNS,
    TOKEN_LISTS,
    Ragged,
    TokenColumns,
)
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.record import Record
from jax_specdec.requests import Request


class ColumnBuilder:
    """Collects records as they come, and keeps nothing of their messages."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._index: dict[str, int] = {}
        self._num_tokens: list[int] = []
        self._reasons: list[int] = []
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._kept: list[KeptSets] = []

    def add(self, records: Iterable[Record]) -> None:
        """Append records: of each request all of them, in order, from its first token on."""
        taken = list(records)
        rows = [self._row(record) for record in taken]
        if rows:
            self._kept.append(KeptSets.joined([_kept(record) for record in taken]))
            names = rows[0].keys()
            self._parts.append({n: np.concatenate([row[n] for row in rows]) for n in names})

    def columns(self) -> TokenColumns:
        """The tokens of all records so far."""
        requests = list(self._requests.values())
        prompts = [request.prompt_token_ids for request in requests]
        parts = self._parts or [_NO_TOKENS]
        joined: dict[str, Any] = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
        lists: dict[str, Any] = {
            name: Ragged.of(
                joined.pop(f"{name}.counts"),
                joined.pop(f"{name}.ids"),
                joined.pop(f"{name}.logprobs"),
            )
            for name in TOKEN_LISTS
        }
        return TokenColumns(
            request_id=np.array(list(self._requests), np.str_),
            prompt=Ragged.of(
                np.array([len(prompt) for prompt in prompts], np.int64),
                np.array([token_id for prompt in prompts for token_id in prompt], np.int32),
            ),
            temperature=np.array([r.params.temperature for r in requests], np.float64),
            mode=np.array([r.params.logprobs_mode for r in requests], np.int8),
            finish_reason=np.array(self._reasons, np.int8),
            kept=KeptSets.joined(self._kept),
            **joined,
            **lists,
        )

    def _row(self, record: Record) -> dict[str, NDArray[Any]]:
        request, n = record.request, record.num_tokens
        index = self._index.setdefault(request.id, len(self._index))
        if request.id not in self._requests:
            self._requests[request.id] = request
            self._num_tokens.append(0)
            self._reasons.append(0)
        begin = len(request.prompt_token_ids) + self._num_tokens[index]
        self._num_tokens[index] += n
        self._reasons[index] = int(record.finish_reason or 0)
        return {
            "request": np.full(n, index, np.int32),
            "position": np.arange(begin, begin + n),
            "step": np.full(n, record.step, np.int64),
            "weights_version": np.full(n, record.weights_version or 0, np.uint32),
            "token_id": record.token_ids,
            "kind": np.array([KINDS.index(kind) for kind in token_kinds(record)], np.int8),
            **_logprobs(record, n),
            **_drafts(record, n),
        }


def _kept(record: Record) -> KeptSets:
    kept = record.kept
    return KeptSets.none(record.num_tokens) if kept is None else kept


def _logprobs(record: Record, n: int) -> dict[str, NDArray[Any]]:
    rows, ranks, topk_ids = record.logprobs, record.token_ranks, record.topk_ids
    chosen = _chosen("chosen", record, n, record.chosen_logprobs)
    if rows is None or ranks is None or topk_ids is None:
        return {
            "logprob": np.full(n, np.nan, np.float32),
            "token_rank": np.full(n, NOT_ASKED, np.int32),
            **_list("topk", np.zeros(n, np.int64), _NO_IDS, _NO_LOGPROBS),
            **chosen,
        }
    there = topk_ids >= 0
    return {
        "logprob": rows[:, 0],
        "token_rank": ranks,
        **_list("topk", there.sum(axis=1), topk_ids[there], rows[:, 1:][there]),
        **chosen,
    }


def _drafts(record: Record, n: int) -> dict[str, NDArray[Any]]:
    """Draft j was proposed for the position of emitted token j."""
    draft = record.draft
    rows = draft.logprobs if draft else None
    return {
        "draft_token_id": _padded(draft.token_ids if draft else None, n, np.int32(-1)),
        "draft_logprob": _padded(None if rows is None else rows[:, 0], n, np.float32(np.nan)),
        "draft_token_rank": _padded(draft.token_ranks if draft else None, n, np.int32(NOT_ASKED)),
        **_chosen("draft_chosen", record, n, draft.chosen_logprobs if draft else None),
    }


def _chosen(
    name: str, record: Record, n: int, logprobs: NDArray[np.float32] | None
) -> dict[str, NDArray[Any]]:
    """Lists of n tokens: C ids where `logprobs` [m, C] has a row for the token, empty elsewhere."""
    ids = np.array(record.request.params.extra_token_ids, np.int32)
    rows = np.empty((0, len(ids)), np.float32) if logprobs is None else logprobs[:n]
    counts = np.zeros(n, np.int64)
    counts[: len(rows)] = len(ids)
    return _list(name, counts, np.tile(ids, len(rows)), rows.ravel())


def _padded(values: NDArray[Any] | None, n: int, fill: np.generic) -> NDArray[Any]:
    result = np.full(n, fill)
    if values is not None:
        result[: len(values)] = values[:n]
    return result


def _list(
    name: str, counts: NDArray[Any], ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    return {f"{name}.counts": counts, f"{name}.ids": ids, f"{name}.logprobs": logprobs}


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)
_NO_TOKENS: dict[str, NDArray[Any]] = {
    **{name: np.empty(0, dtype) for name, dtype in TOKEN_COLUMNS.items()},
    **{
        part: values
        for name in TOKEN_LISTS
        for part, values in _list(name, np.empty(0, np.int64), _NO_IDS, _NO_LOGPROBS).items()
    },
}
