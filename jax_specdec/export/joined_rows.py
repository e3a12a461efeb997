"""Batches of `step_rows` put together again: the columns of all their tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.token_columns import FILLS, TOKEN_COLUMNS, TOKEN_LISTS, Ragged, TokenColumns
from jax_specdec.kept_sets import KeptSets
from jax_specdec.requests import Request


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
