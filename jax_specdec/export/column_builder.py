"""Records as columns for people who train on logprobs: one row a token, NumPy, nothing lost.

`ColumnBuilder` collects records of many requests, `TokenColumns` is the result, `save` and `load`
keep it in an npz file. `arrow.py` makes Arrow tables and Parquet files of it. No jax.
"""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
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
from jax_specdec.records.record import Record
from jax_specdec.requests import Request

__all__ = ["KINDS", "NOT_ASKED", "Ragged", "TokenColumns", "ColumnBuilder", "save", "load"]

FORMAT = 2  # of an npz file; 1 had no `draft_chosen`


class ColumnBuilder:
    """Collects records as they come; nothing of their messages is kept."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._index: dict[str, int] = {}
        self._num_tokens: list[int] = []
        self._reasons: list[int] = []
        self._parts: list[dict[str, NDArray[Any]]] = []

    def add(self, records: Iterable[Record]) -> None:
        """Append records; those of a request from its first token on, in order."""
        rows = [self._row(record) for record in records]
        if rows:
            names = rows[0].keys()
            self._parts.append({n: np.concatenate([row[n] for row in rows]) for n in names})

    def columns(self) -> TokenColumns:
        """Everything that was added."""
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
            "token_id": record.token_ids,
            "kind": np.array([KINDS.index(kind) for kind in token_kinds(record)], np.int8),
            **_logprobs(record, n),
            **_drafts(record, n),
        }


def save(path: Path | str, columns: TokenColumns) -> None:
    """Write an npz file; lists become `NAME.offsets`, `NAME.ids` and `NAME.logprobs`."""
    arrays: dict[str, Any] = {"format": np.array(FORMAT)}
    for field in fields(columns):
        value = getattr(columns, field.name)
        if isinstance(value, Ragged):
            parts = {"offsets": value.offsets, "ids": value.ids, "logprobs": value.logprobs}
            arrays |= {f"{field.name}.{n}": a for n, a in parts.items() if a is not None}
        else:
            arrays[field.name] = value
    with Path(path).open("wb") as file:  # numpy would add .npz to a name without it
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(path: Path | str) -> TokenColumns:
    """Read what `save` wrote.

    Raises:
      ValueError: not such a file, or of another format.
    """
    with np.load(path, allow_pickle=False) as arrays:
        if "format" not in arrays:
            raise ValueError(f"{path} is no file of columns: save writes them")
        if (found := int(arrays["format"])) != FORMAT:
            raise ValueError(
                f"{path} has columns in format {found}, and this version reads {FORMAT}: load it "
                "with the version that wrote it, or collect its records again"
            )
        values: dict[str, Any] = {}
        for field in fields(TokenColumns):
            if field.name in arrays:
                values[field.name] = arrays[field.name]
            else:
                logprobs = f"{field.name}.logprobs"
                values[field.name] = Ragged(
                    arrays[f"{field.name}.offsets"],
                    arrays[f"{field.name}.ids"],
                    arrays.get(logprobs),
                )
    return TokenColumns(**values)


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
    """The lists of n tokens: C ids each where `logprobs` [m, C] has a row for it, else none."""
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
