"""Columns of whole steps as Arrow, one row a request; no record is touched alone.

`ColumnBuilder` keeps the records of many requests until they have ended. Here each call makes a
batch of what some steps brought, and forgets it: for who passes records on as they come.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.prompt_columns import PromptColumns
from jax_specdec.export.runs import offsets, sorted_lists
from jax_specdec.export.token_columns import FILLS, TOKEN_COLUMNS, TOKEN_LISTS, Ragged, TokenColumns
from jax_specdec.export.token_parts import token_parts
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.batch import RecordBatch
from jax_specdec.requests import Request


def step_rows(batches: Iterable[RecordBatch], emitted: MutableMapping[str, int]) -> Any:
    """A `pyarrow.RecordBatch` of the records of some steps, one row a request that has any.

    Columns of a row: `request_id`; `position` int64, the place of its first token here in its
    sequence; `finish_reason` int8 `FinishReason`, 0 where it goes on; `cumulative_logprob` float64.
    Lists of a value for each token, in order: `step` int64, `weights_version` uint32, `token_id`
    int32, `kind` int8. Where some request asked for logprobs also `logprob` float32 and
    `token_rank` int32, the lists of lists `topk_ids`, `topk_logprobs`, and what else was asked for:
    `chosen_*`, `draft_*`, `kept_*`. There are no nulls: values are those of `TokenColumns`.

    Where some request's prompt has logprobs here, also: `prompt_start` int64, the place of the
    first such token in the prompt, 0 where there is none; a list of one value for each such token,
    `prompt_weights_version` uint32 and `prompt_token_ranks` int32; and the lists of lists
    `prompt_logprobs` float32, of the token itself, then of the top K, then of the chosen ids, and
    `prompt_topk_ids` int32, -1 where fewer than K are finite. They are those of `PromptRows`.

    Args:
      batches: of any number of workers, those of one in order.
      emitted: for each request that has no end yet, how many of its tokens came before, prompt not
        counted; kept up to date. One that is not there begins.
    """
    pa = pyarrow()
    taken = [batch for batch in batches if len(batch)]
    requests, places, reasons, row, tokens, kept = token_parts(taken)
    sums, prompts = np.zeros(len(requests), np.float64), PromptColumns()
    for batch, rows in zip(taken, places, strict=True):
        sums[rows] = batch.cumulative_logprob
        prompts.add(batch, rows)
    names = [request.id for request in requests]
    counts = np.bincount(row, minlength=len(names))
    before = np.array([emitted.get(name, 0) for name in names], np.int64)
    lengths = [len(request.packed_prompt) // 4 for request in requests]
    emitted.update(zip(names, (before + counts).tolist(), strict=True))
    for ended in np.flatnonzero(reasons).tolist():
        emitted.pop(names[ended], None)
    order = None
    if (row[1:] < row[:-1]).any():
        # Of 16 bits, NumPy's stable sort is a radix sort.
        small = row.astype(np.uint16) if len(names) < 1 << 16 else row
        order = small.argsort(kind="stable")
    columns: dict[str, Any] = {
        "request_id": pa.array(names, pa.string()),
        "position": pa.array(np.array(lengths, np.int64) + before),
        "finish_reason": pa.array(reasons),
        "cumulative_logprob": pa.array(sums),
    }
    outer = pa.array(offsets(counts))

    def whole(name: str, values: Any) -> None:
        columns[name] = pa.ListArray.from_arrays(outer, values)

    for name, values in tokens.items():
        if "." not in name:
            whole(name, pa.array(values if order is None else values[order]))
    for name in TOKEN_LISTS:
        sizes = tokens.get(f"{name}.counts")
        if sizes is None or not sizes.any():
            continue
        takes, sizes = sorted_lists(sizes, order)
        inner = pa.array(offsets(sizes))
        for what in ("ids", "logprobs"):
            values = takes(tokens[f"{name}.{what}"])
            whole(f"{name}_{what}", pa.ListArray.from_arrays(inner, pa.array(values)))
    if kept is not None:
        kept = kept if order is None else kept.take(order)
        whole("kept_count", pa.array(kept.counts))
        whole("log_kept", pa.array(kept.log_kept))
        inner = pa.array(kept.offsets.astype(np.int32))
        whole("kept_ids", pa.ListArray.from_arrays(inner, pa.array(kept.token_ids)))
    columns |= prompts.columns(len(names))
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def joined_rows(batches: Sequence[Any], requests: Mapping[str, Request]) -> TokenColumns:
    """The columns of the tokens of `batches`: of each request one batch after the other.

    Args:
      batches: `pyarrow.RecordBatch` as `step_rows` makes them.
      requests: by id, at least those of the batches.

    Raises:
      KeyError: a batch has a request that is not among them.
    """
    index: dict[str, int] = {}
    reasons: dict[int, int] = {}
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in TOKEN_COLUMNS}
    lists: dict[str, list[tuple[NDArray[Any], ...]]] = {
        "topk": [], "chosen": [], "draft_chosen": [], "kept": [],
    }  # fmt: skip
    for batch in batches:
        names = batch.column("request_id").to_pylist()
        found = np.array([index.setdefault(name, len(index)) for name in names], np.int32)
        for at, reason in enumerate(batch.column("finish_reason").to_numpy().tolist()):
            reasons[int(found[at])] = reason or reasons.get(int(found[at]), 0)
        ids = batch.column("token_id")
        offsets = ids.offsets.to_numpy()
        counts = np.diff(offsets)
        total = int(offsets[-1])
        parts["request"].append(found.repeat(counts))
        begins = batch.column("position").to_numpy() - offsets[:-1]
        parts["position"].append(begins.repeat(counts) + np.arange(total))
        for name in TOKEN_COLUMNS:
            if name not in ("request", "position"):
                parts[name].append(_values(batch, name, total))
        for name in TOKEN_LISTS:
            lists[name].append(_lists(batch, f"{name}_ids", f"{name}_logprobs", total))
        kept = batch.schema.get_field_index("kept_count") >= 0
        lists["kept"].append(
            (
                batch.column("kept_count").values.to_numpy() if kept else np.zeros(total, np.int32),
                batch.column("log_kept").values.to_numpy() if kept else np.zeros(total, np.float32),
                batch.column("kept_ids").values.values.to_numpy() if kept else _NO_IDS,
            )
        )
    mine = [requests[name] for name in index]
    prompts = [np.frombuffer(request.packed_prompt, np.int32) for request in mine]
    columns: dict[str, Any] = {
        name: np.concatenate([np.empty(0, kind), *parts[name]])
        for name, kind in TOKEN_COLUMNS.items()
    }
    for name in TOKEN_LISTS:
        columns[name] = Ragged.of(*_together(lists[name], (np.int64, np.int32, np.float32)))
    return TokenColumns(
        request_id=np.array(list(index), np.str_),
        prompt=Ragged.of(
            np.array([len(prompt) for prompt in prompts], np.int64),
            np.concatenate([_NO_IDS, *prompts]),
        ),
        temperature=np.array([request.params.temperature for request in mine], np.float64),
        mode=np.array([request.params.logprobs_mode for request in mine], np.int8),
        finish_reason=np.array([reasons[at] for at in range(len(mine))], np.int8),
        kept=KeptSets.of(*_together(lists["kept"], (np.int32, np.float32, np.int32))),
        **columns,
    )


def _values(batch: Any, name: str, total: int) -> NDArray[Any]:
    if batch.schema.get_field_index(name) < 0:
        return np.full(total, FILLS[name], TOKEN_COLUMNS[name])
    values: NDArray[Any] = batch.column(name).values.to_numpy()
    return values


def _lists(batch: Any, ids: str, logprobs: str, total: int) -> tuple[NDArray[Any], ...]:
    if batch.schema.get_field_index(ids) < 0:
        return np.zeros(total, np.int64), _NO_IDS, np.empty(0, np.float32)
    inner = batch.column(ids).values
    counts = np.diff(inner.offsets.to_numpy()).astype(np.int64)
    values = batch.column(logprobs).values.values.to_numpy()
    return counts, inner.values.to_numpy(), values


def _together(found: Sequence[tuple[NDArray[Any], ...]], kinds: tuple[type, ...]) -> Any:
    return tuple(
        np.concatenate([np.empty(0, kind), *(one[at] for one in found)])
        for at, kind in enumerate(kinds)
    )


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
