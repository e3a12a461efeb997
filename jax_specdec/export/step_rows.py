"""Columns of whole steps as Arrow, one row a request; no record is touched alone.

`ColumnBuilder` keeps the records of many requests until they have ended. Here each call makes a
batch of what some steps brought, and forgets it: for who passes records on as they come.
"""

import itertools
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.prompt_columns import PromptColumns
from jax_specdec.export.runs import sorted_lists
from jax_specdec.export.token_columns import TOKEN_COLUMNS, TOKEN_LISTS, TokenColumns
from jax_specdec.export.token_parts import token_parts
from jax_specdec.kept_sets import KeptSets, offsets_of
from jax_specdec.records.batch import RecordBatch
from jax_specdec.requests import Request


def step_rows(batches: Iterable[RecordBatch], emitted: MutableMapping[str, int]) -> Any:
    """A `pyarrow.RecordBatch` of the records of some steps, one row a request that has any.

    Columns of a row: `request_id`; `position` int64, the place of its first token here in its
    sequence; `finish_reason` int8 `FinishReason`, 0 where it goes on; `cumulative_logprob` float64.
    Lists of a value for each token, in order: `step` int64, `weights_version` uint32, `digest`
    uint16, `token_id` int32, `kind` int8. Where some request asked for logprobs also `logprob`
    float32 and `token_rank` int32, the lists of lists `topk_ids`, `topk_logprobs`, and what else
    was asked for: `entropy`, `log_sum_exp`, `extra_token_ids` and `chosen_logprobs`, `draft_*`,
    `kept_*`. There are no nulls: values are those of `TokenColumns`.

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
    if taken:  # of a request's records the last one has the sum
        sums[places] = np.concatenate([batch.cumulative_logprob for batch in taken])
    for batch, end in zip(taken, itertools.accumulate(map(len, taken)), strict=True):
        prompts.add(batch, places[end - len(batch) : end])
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
    outer = pa.array(offsets_of(counts), pa.int32())

    def add_column(name: str, values: Any) -> None:
        columns[name] = pa.ListArray.from_arrays(outer, values)

    for name, values in tokens.items():
        if "." not in name:
            add_column(name, pa.array(values if order is None else values.take(order)))
    for name, ids in TOKEN_LISTS.items():
        sizes = tokens.get(f"{name}.counts")
        if sizes is None or not sizes.any():
            continue
        takes, sizes = sorted_lists(sizes, order)
        inner = pa.array(offsets_of(sizes), pa.int32())
        for column, what in ((ids, "ids"), (f"{name}_logprobs", "logprobs")):
            values = takes(tokens[f"{name}.{what}"])
            add_column(column, pa.ListArray.from_arrays(inner, pa.array(values)))
    if kept is not None:
        kept = kept if order is None else kept.take(order)
        add_column("kept_count", pa.array(kept.counts))
        add_column("log_kept", pa.array(kept.log_kept))
        inner = pa.array(kept.offsets.astype(np.int32))
        add_column("kept_token_ids", pa.ListArray.from_arrays(inner, pa.array(kept.token_ids)))
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
    builder = ColumnBuilder()
    for batch in batches:
        there = batch.schema.names
        row_requests = [requests[name] for name in batch.column("request_id").to_pylist()]
        offsets = batch.column("token_id").offsets.to_numpy()
        counts, total = np.diff(offsets), int(offsets[-1])
        begins = batch.column("position").to_numpy() - offsets[:-1]
        tokens: dict[str, NDArray[Any]] = {"position": begins.repeat(counts) + np.arange(total)}
        for name in TOKEN_COLUMNS:
            if name in there and name not in tokens:
                tokens[name] = batch.column(name).values.to_numpy()
        for name, ids in TOKEN_LISTS.items():
            if ids in there:
                inner = batch.column(ids).values
                logprobs = batch.column(f"{name}_logprobs").values.values
                tokens[f"{name}.counts"] = np.diff(inner.offsets.to_numpy())
                tokens[f"{name}.ids"] = inner.values.to_numpy()
                tokens[f"{name}.logprobs"] = logprobs.to_numpy()
        kept = None
        if "kept_count" in there:
            names = "kept_count", "log_kept", "kept_token_ids"
            sizes, masses, sets = (batch.column(name).values for name in names)
            kept = KeptSets.of(sizes.to_numpy(), masses.to_numpy(), sets.values.to_numpy())
        reasons = batch.column("finish_reason").to_numpy()
        builder.put(
            row_requests, reasons, np.arange(len(row_requests)).repeat(counts), tokens, kept
        )
    return builder.columns()
