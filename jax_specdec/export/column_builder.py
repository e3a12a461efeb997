"""Records as columns for training on logprobs: one row a token, NumPy, nothing lost.

`ColumnBuilder` collects the records of many requests, and `TokenColumns` is the result; `arrow.py`
makes Arrow tables and Parquet files of it.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.token_columns import FILLS, TOKEN_COLUMNS, TOKEN_LISTS, Ragged, TokenColumns
from jax_specdec.export.token_parts import token_parts
from jax_specdec.kept_sets import KeptSets, places_within
from jax_specdec.records.record import Record, Records
from jax_specdec.requests import Request


class ColumnBuilder:
    """Collects records as they come, and keeps nothing of their messages."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._index: dict[str, int] = {}
        self._reasons: list[int] = []
        self._num_tokens: collections.Counter[str] = collections.Counter()  # of records
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._kept: list[KeptSets] = []

    def add(self, records: Iterable[Record]) -> None:
        """Append records: of each request all of them, in order, from its first token on."""
        batches = (
            records.batches
            if isinstance(records, Records)
            else [record.batch.take(np.array([record.index])) for record in records]
        )
        requests, _, reasons, row, tokens, kept = token_parts(
            [item for item in batches if len(item)]
        )
        counts = np.bincount(row, minlength=len(requests))
        begins = np.array(
            [len(item.packed_prompt) // 4 + self._num_tokens[item.id] for item in requests],
            np.int64,
        )
        place = np.empty(len(row), np.int64)
        place[row.argsort(kind="stable")] = places_within(counts)
        for request, count in zip(requests, counts.tolist(), strict=True):
            self._num_tokens[request.id] += count
        self.put(requests, reasons, row, tokens | {"position": begins[row] + place}, kept)

    def put(
        self,
        requests: Sequence[Request],
        reasons: NDArray[np.int8],
        row: NDArray[np.int64],
        tokens: dict[str, NDArray[Any]],
        kept: KeptSets | None,
    ) -> None:
        """Append tokens as columns, copied; arguments as `TokenParts` has them, and positions."""
        for request, reason in zip(requests, reasons.tolist(), strict=True):
            if request.id not in self._index:
                self._index[request.id] = len(self._index)
                self._requests[request.id] = request
                self._reasons.append(0)
            self._reasons[self._index[request.id]] |= reason
        if len(row):
            index = np.array([self._index[request.id] for request in requests], np.int32)
            self._parts.append(_filled(tokens | {"request": index[row]}, len(row)))
            self._kept.append(KeptSets.none(len(row)) if kept is None else kept)

    def columns(self) -> TokenColumns:
        """The tokens of all records so far."""
        requests = list(self._requests.values())
        prompts = [np.frombuffer(request.packed_prompt, np.int32) for request in requests]
        parts = self._parts or [_filled({}, 0)]
        joined: dict[str, Any] = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
        lists: dict[str, Any] = {
            name: Ragged.of(*(joined.pop(f"{name}.{part}") for part in _LIST))
            for name in TOKEN_LISTS
        }
        return TokenColumns(
            request_id=np.array(list(self._requests), np.str_),
            prompt=Ragged.of(
                np.array([len(prompt) for prompt in prompts], np.int64),
                np.concatenate([np.empty(0, np.int32), *prompts]),
            ),
            temperature=np.array([r.params.temperature for r in requests], np.float64),
            logprobs_mode=np.array([r.params.logprobs_mode for r in requests], np.int8),
            finish_reason=np.array(self._reasons, np.int8),
            kept=KeptSets.joined(self._kept),
            **joined,
            **lists,
        )


def _filled(tokens: dict[str, NDArray[Any]], n: int) -> dict[str, NDArray[Any]]:
    """All columns of n tokens, as copies; what no request asked for is filled up."""
    column = {
        name: np.array(tokens.get(name, np.full(n, FILLS.get(name, 0), kind)))
        for name, kind in TOKEN_COLUMNS.items()
    }
    for name in TOKEN_LISTS:
        for part, kind in _LIST.items():
            zeros = np.zeros(n if part == "counts" else 0, kind)
            column[f"{name}.{part}"] = np.array(tokens.get(f"{name}.{part}", zeros))
    return column


_LIST = {"counts": np.int64, "ids": np.int32, "logprobs": np.float32}
