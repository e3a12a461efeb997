"""The logprobs of prompts as columns of Arrow, one row a request, and back.

They are the values of `Record.prompt`, nothing left out: a reader gets the same `PromptRows`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.arrow import pyarrow
from jax_specdec.kept_sets import offsets_of
from jax_specdec.records.batch import PromptRows, RecordBatch
from jax_specdec.requests import Request

START, VERSION = "prompt_start", "prompt_weights_version"
LOGPROBS, RANKS, TOP_IDS = "prompt_logprobs", "prompt_token_ranks", "prompt_topk_ids"


class PromptColumns:
    """Collects parts of prompts' logprobs, of each request in order."""

    def __init__(self) -> None:
        """Know of none."""
        self._parts: list[tuple[int, NDArray[np.uint32], PromptRows]] = []

    def add(self, batch: RecordBatch, rows: NDArray[np.int64]) -> None:
        """Add what records have of prompts; `rows` [N] are those of the records' requests."""
        if batch.prompt is None:
            return
        version = batch.prompt.message.weights_version
        for at, (row, slot) in enumerate(zip(rows.tolist(), batch.slots.tolist(), strict=True)):
            prompt_rows = batch.prompt.rows(at, slot)
            self.put(row, np.full(len(prompt_rows.token_ids), version, np.uint32), prompt_rows)

    def put(self, row: int, versions: NDArray[np.uint32], prompt_rows: PromptRows) -> None:
        """Add n rows of the prompt of the request of row `row`; `versions` is [n]."""
        self._parts.append((row, versions, prompt_rows))

    def columns(self, num_rows: int, *, always: bool = False) -> dict[str, Any]:
        """Arrow arrays by name, of `num_rows` rows; where no prompt has any, only if `always`."""
        if not (self._parts or always):
            return {}
        pa = pyarrow()
        parts = sorted(self._parts, key=lambda part: part[0])
        starts, counts = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        for row, _, prompt_rows in reversed(parts):
            starts[row] = prompt_rows.start  # at last of the first part
            counts[row] += len(prompt_rows.token_ids)
        outer = pa.array(offsets_of(counts), pa.int32())
        rows = [prompt_rows for _, _, prompt_rows in parts]
        values = {
            VERSION: pa.array(_joined([versions for _, versions, _ in parts], np.uint32)),
            RANKS: pa.array(_joined([rows_of_part.token_ranks for rows_of_part in rows], np.int32)),
            LOGPROBS: _inner(
                [np.hstack([x.logprobs, x.chosen_logprobs]) for x in rows], np.float32
            ),
            TOP_IDS: _inner([rows_of_part.topk_ids for rows_of_part in rows], np.int32),
        }
        return {START: pa.array(starts)} | {
            name: pa.ListArray.from_arrays(outer, inner) for name, inner in values.items()
        }


def prompt_part(batch: Any, row: int, request: Request) -> PromptRows | None:
    """The prompt's part in row `row` of a `pyarrow.RecordBatch`; views of its memory.

    None where it has nothing of it.
    """
    begin, end = prompt_span(batch, row)
    k = request.params.prompt_logprobs
    if begin == end or k is None:
        return None
    start = int(batch.column(START)[row].as_py())
    logprobs = _table(batch, LOGPROBS, begin, end)
    return PromptRows(
        start=start,
        token_ids=np.frombuffer(request.packed_prompt, np.int32)[start : start + end - begin],
        logprobs=logprobs[:, : k + 1],
        chosen_logprobs=logprobs[:, k + 1 :],
        token_ranks=batch.column(RANKS).values.to_numpy()[begin:end],
        topk_ids=_table(batch, TOP_IDS, begin, end),
    )


def prompt_versions(batch: Any, row: int) -> NDArray[np.uint32]:
    """[n] uint32, of the weights that made each of the rows of `prompt_part`."""
    begin, end = prompt_span(batch, row)
    if begin == end:
        return np.empty(0, np.uint32)
    versions: NDArray[np.uint32] = batch.column(VERSION).values.to_numpy()[begin:end]
    return versions


def prompt_span(batch: Any, row: int) -> tuple[int, int]:
    """Where a row's prompt tokens begin and end among those of all rows."""
    if batch.schema.get_field_index(START) < 0:
        return 0, 0
    begins = batch.column(RANKS).offsets
    return begins[row].as_py(), begins[row + 1].as_py()


def _table(batch: Any, name: str, begin: int, end: int) -> NDArray[Any]:
    """[end - begin, width], the lists of some prompt tokens of one request: equally long ones."""
    inner = batch.column(name).values
    first, last = inner.offsets[begin].as_py(), inner.offsets[end].as_py()
    table: NDArray[Any] = inner.values.to_numpy()[first:last].reshape(end - begin, -1)
    return table


def _inner(tables: Sequence[NDArray[Any]], dtype: type) -> Any:
    """Tables [n, width] one after the other, a list for each of their rows."""
    pa = pyarrow()
    widths = _joined([np.full(len(table), table.shape[1]) for table in tables], np.int64)
    values = _joined([table.reshape(-1) for table in tables], dtype)
    return pa.ListArray.from_arrays(pa.array(offsets_of(widths), pa.int32()), pa.array(values))


def _joined(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])
