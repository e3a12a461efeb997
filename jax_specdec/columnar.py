"""Records as columns for people who train on logprobs: one row a token, NumPy, nothing lost.

`ColumnBuilder` collects records of many requests, `Columns` is the result, `save` and `load` keep
it in an npz file. `arrow.py` makes Arrow tables and Parquet files of it. No jax.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.records import Record
from jax_specdec.requests import Request
from jax_specdec.speculation import token_kinds

FORMAT = 1
KINDS = ("plain", "accepted", "recovered", "bonus")  # the words of `Columns.kind`
NOT_ASKED = -1  # in `Columns.token_rank`


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A list a row: those of row i are `values[offsets[i] : offsets[i + 1]]`.

    Attributes:
      offsets: [N+1] int64, from 0.
      ids: [M] int32.
      logprobs: [M] float32, of these ids; None where ids have none (a prompt).
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None

    def dense(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and logprobs as [N, K] with K the longest list; -1 and -inf fill the others up."""
        counts = np.diff(self.offsets)
        there = np.arange(counts.max(initial=0)) < counts[:, None]
        ids = np.full(there.shape, -1, np.int32)
        logprobs = np.full(there.shape, -np.inf, np.float32)
        ids[there] = self.ids
        if self.logprobs is not None:
            logprobs[there] = self.logprobs
        return ids, logprobs


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Columns:
    """N tokens of Q requests; one request's tokens are in order, requests are interleaved.

    Attributes:
      request_id: [Q] str, in the order of their first records.
      prompt: of each request, its prompt's ids.
      temperature: [Q] float64, as asked.
      mode: [Q] int8, `LogprobsMode`: the distribution that the request's logprobs are of.
      finish_reason: [Q] int8 `FinishReason`, 0 for a request that had not ended.
      request: [N] int32, the index of the token's request.
      position: [N] int64, of the token in its sequence; the first after the prompt is at the
        prompt's length.
      step: [N] int64, the step that emitted it.
      token_id: [N] int32.
      logprob: [N] float32; NaN where the row was invalid or no logprobs were asked.
      token_rank: [N] int32, 1 the most likely; 0 in an invalid row, NOT_ASKED where none asked.
      kind: [N] int8, what the token was to verification, an index of KINDS.
      draft_token_id: [N] int32, the draft that was proposed for this position; -1 if none was, or
        its message did not come. Drafts behind the first rejected one have no position here.
      draft_logprob: [N] float32, that draft's logprob under the draft model; NaN if not known.
      draft_token_rank: [N] int32, likewise; NOT_ASKED if not known.
      topk: of each token, the top K that are finite, most likely first.
      chosen: of each token, the request's `extra_token_ids`.
    """

    request_id: NDArray[np.str_]
    prompt: Ragged
    temperature: NDArray[np.float64]
    mode: NDArray[np.int8]
    finish_reason: NDArray[np.int8]
    request: NDArray[np.int32]
    position: NDArray[np.int64]
    step: NDArray[np.int64]
    token_id: NDArray[np.int32]
    logprob: NDArray[np.float32]
    token_rank: NDArray[np.int32]
    kind: NDArray[np.int8]
    draft_token_id: NDArray[np.int32]
    draft_logprob: NDArray[np.float32]
    draft_token_rank: NDArray[np.int32]
    topk: Ragged
    chosen: Ragged

    def __len__(self) -> int:
        return len(self.token_id)

    def of_request(self, index: int) -> "Columns":
        """The rows of one request, in order; what is a request's own stays as it is."""
        rows = np.flatnonzero(self.request == index)
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in TOKEN_COLUMNS}
        taken |= {name: _take(getattr(self, name), rows) for name in TOKEN_LISTS}
        return replace(self, **taken)


TOKEN_COLUMNS = {
    "request": np.int32,
    "position": np.int64,
    "step": np.int64,
    "token_id": np.int32,
    "logprob": np.float32,
    "token_rank": np.int32,
    "kind": np.int8,
    "draft_token_id": np.int32,
    "draft_logprob": np.float32,
    "draft_token_rank": np.int32,
}
TOKEN_LISTS = ("topk", "chosen")


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

    def columns(self) -> Columns:
        """Everything that was added."""
        requests = list(self._requests.values())
        prompts = [request.prompt_token_ids for request in requests]
        parts = self._parts or [_EMPTY]
        joined: dict[str, Any] = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
        lists: dict[str, Any] = {
            name: Ragged(
                _offsets(joined.pop(f"{name}.counts")),
                joined.pop(f"{name}.ids"),
                joined.pop(f"{name}.logprobs"),
            )
            for name in TOKEN_LISTS
        }
        return Columns(
            request_id=np.array(list(self._requests), np.str_),
            prompt=Ragged(
                _offsets(np.array([len(prompt) for prompt in prompts], np.int64)),
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


def save(path: Path | str, columns: Columns) -> None:
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


def load(path: Path | str) -> Columns:
    """Read what `save` wrote.

    Raises:
      ValueError: not such a file, or of another format.
    """
    with np.load(path, allow_pickle=False) as arrays:
        if "format" not in arrays or int(arrays["format"]) != FORMAT:
            raise ValueError(f"{path} is no file of columns in format {FORMAT}: save writes them")
        values: dict[str, Any] = {}
        for field in fields(Columns):
            if field.name in arrays:
                values[field.name] = arrays[field.name]
            else:
                logprobs = f"{field.name}.logprobs"
                values[field.name] = Ragged(
                    arrays[f"{field.name}.offsets"],
                    arrays[f"{field.name}.ids"],
                    arrays.get(logprobs),
                )
    return Columns(**values)


def _logprobs(record: Record, n: int) -> dict[str, NDArray[Any]]:
    rows, ranks = record.logprobs, record.token_ranks
    topk_ids, chosen = record.topk_ids, record.chosen_logprobs
    if rows is None or ranks is None or topk_ids is None or chosen is None:
        none = np.zeros(n, np.int64)
        return {
            "logprob": np.full(n, np.nan, np.float32),
            "token_rank": np.full(n, NOT_ASKED, np.int32),
            **_list("topk", none, _NO_IDS, _NO_LOGPROBS),
            **_list("chosen", none, _NO_IDS, _NO_LOGPROBS),
        }
    there = topk_ids >= 0
    ids = np.array(record.request.params.extra_token_ids, np.int32)
    return {
        "logprob": rows[:, 0],
        "token_rank": ranks,
        **_list("topk", there.sum(axis=1), topk_ids[there], rows[:, 1:][there]),
        **_list("chosen", np.full(n, len(ids)), np.tile(ids, n), chosen.ravel()),
    }


def _drafts(record: Record, n: int) -> dict[str, NDArray[Any]]:
    """Draft j was proposed for the position of emitted token j."""
    ids, rows, ranks = record.draft_token_ids, record.draft_logprobs, record.draft_token_ranks
    return {
        "draft_token_id": _padded(ids, n, np.int32(-1)),
        "draft_logprob": _padded(None if rows is None else rows[:, 0], n, np.float32(np.nan)),
        "draft_token_rank": _padded(ranks, n, np.int32(NOT_ASKED)),
    }


def _padded(values: NDArray[Any] | None, n: int, fill: np.generic) -> NDArray[Any]:
    result = np.full(n, fill)
    if values is not None:
        result[: len(values)] = values[:n]
    return result


def _list(
    name: str, counts: NDArray[Any], ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    return {f"{name}.counts": counts, f"{name}.ids": ids, f"{name}.logprobs": logprobs}


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _take(ragged: Ragged, rows: NDArray[np.intp]) -> Ragged:
    counts = np.diff(ragged.offsets)
    keep = np.zeros(len(counts), np.bool_)
    keep[rows] = True
    cells = np.repeat(keep, counts)  # `rows` ascend
    logprobs = None if ragged.logprobs is None else ragged.logprobs[cells]
    return Ragged(_offsets(counts[rows]), ragged.ids[cells], logprobs)


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)
_EMPTY: dict[str, NDArray[Any]] = {
    **{name: np.empty(0, dtype) for name, dtype in TOKEN_COLUMNS.items()},
    **_list("topk", np.empty(0, np.int64), _NO_IDS, _NO_LOGPROBS),
    **_list("chosen", np.empty(0, np.int64), _NO_IDS, _NO_LOGPROBS),
}
