"""Columns as Arrow tables and Parquet files (extra `arrow`).

There are two tables: one row a token, and one row a request; or a single one, one row a sequence,
with lists of what its tokens have. NaN is the logprob of an invalid row, which has no entropy; what
was not asked for or is not known is null.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ipc.wire import LogprobsMode
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.token_columns import (
    FILLS,
    KNOWN_BY,
    TOKEN_COLUMNS,
    TOKEN_KINDS,
    TOKEN_LISTS,
    Ragged,
    TokenColumns,
)
from jax_specdec.kept_sets import KeptSets, offsets_of
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import ROW_VALUES

TOKENS, REQUESTS = "tokens.parquet", "requests.parquet"
_NUMBERS = [name for name in TOKEN_COLUMNS if name not in ("request", "kind")]


def tokens_table(columns: TokenColumns) -> Any:
    """A `pyarrow.Table`, one row a token: the columns of `TokenColumns` by the same names.

    `request_id` and `kind` are dictionary columns of words. Lists become two columns each:
    `topk_ids` and `topk_logprobs`, `extra_token_ids` and `chosen_logprobs`,
    `draft_extra_token_ids` and `draft_chosen_logprobs`. Kept sets become three: `kept_count` and
    `log_kept`, null where they were not asked for, and the list `kept_token_ids`.
    """
    pa = pyarrow()

    def words(places: Any, texts: Sequence[str]) -> Any:
        return pa.DictionaryArray.from_arrays(places, pa.array(texts, pa.string()))

    arrays = {"request_id": words(columns.request, columns.request_id.tolist())}
    for name in [*TOKEN_COLUMNS][1:]:
        values, told = getattr(columns, name), KNOWN_BY.get(name)
        unknown = None if told is None else getattr(columns, told) == -1
        if name in ROW_VALUES:
            unknown = np.isnan(values)
        elif name == "row_digest":
            unknown = values == 0
        arrays[name] = (
            words(values, TOKEN_KINDS) if name == "kind" else pa.array(values, mask=unknown)
        )
    for name, ids in TOKEN_LISTS.items():
        ragged = getattr(columns, name)
        arrays[ids] = _lists(pa, ragged, ragged.ids)
        arrays[f"{name}_logprobs"] = _lists(pa, ragged, ragged.logprobs)
    kept = columns.kept
    for name, values in (("kept_count", kept.counts), ("log_kept", kept.log_kept)):
        arrays[name] = pa.array(values, mask=kept.counts == 0)
    arrays["kept_token_ids"] = _lists(pa, kept, kept.token_ids)
    return pa.table(arrays)


def requests_table(columns: TokenColumns) -> Any:
    """A `pyarrow.Table`, one row a request, with words for the mode and the finish reason."""
    pa = pyarrow()
    reasons = [FinishReason(n).name.lower() if n else None for n in columns.finish_reason.tolist()]
    modes = [LogprobsMode(n).name.lower() for n in columns.logprobs_mode.tolist()]
    return pa.table(
        {
            "request_id": pa.array(columns.request_id.tolist(), pa.string()),
            "prompt_token_ids": _lists(pa, columns.prompt, columns.prompt.ids),
            "temperature": columns.temperature,
            "logprobs_mode": pa.array(modes, pa.string()),
            "finish_reason": pa.array(reasons, pa.string()),
        }
    )


def from_tables(tokens: Any, requests: Any) -> TokenColumns:
    """The columns that `tokens_table` and `requests_table` were made of.

    Raises:
      ValueError: a table lacks columns, as one that an earlier version wrote does.
    """
    empty = ColumnBuilder().columns()
    for table, expected in ((tokens, tokens_table(empty)), (requests, requests_table(empty))):
        if missing := sorted(set(expected.column_names) - set(table.column_names)):
            raise _incomplete(missing)
    ids = requests["request_id"].to_pylist()
    index = {request_id: n for n, request_id in enumerate(ids)}
    reasons = requests["finish_reason"].to_pylist()
    modes = requests["logprobs_mode"].to_pylist()
    arrays: dict[str, Any] = {name: _filled(tokens[name], FILLS.get(name)) for name in _NUMBERS}
    for name, lists in TOKEN_LISTS.items():
        arrays[name] = _ragged(tokens[lists], tokens[f"{name}_logprobs"])
    return TokenColumns(
        request_id=np.array(ids, np.str_),
        prompt=_ragged(requests["prompt_token_ids"]),
        temperature=requests["temperature"].to_numpy(),
        logprobs_mode=np.array([LogprobsMode[word.upper()] for word in modes], np.int8),
        finish_reason=np.array(
            [FinishReason[word.upper()] if word else 0 for word in reasons], np.int8
        ),
        request=np.array([index[i] for i in tokens["request_id"].to_pylist()], np.int32),
        kind=np.array([TOKEN_KINDS.index(word) for word in tokens["kind"].to_pylist()], np.int8),
        **arrays,
        kept=KeptSets.of(
            _filled(tokens["kept_count"], 0),
            _filled(tokens["log_kept"], 0),
            _ragged(tokens["kept_token_ids"]).ids,
        ),
    )


def sequences_table(columns: TokenColumns) -> Any:
    """A `pyarrow.Table`, one row a request: the columns of `requests_table`, and lists.

    Each other column of `tokens_table` is a list here, of one value for each token of the request,
    in order: `token_id`, `logprob`, `weights_version` and so on. `topk_ids` and what else is a list
    there is a list of lists.
    """
    pa = pyarrow()
    tokens = tokens_table(columns)
    rows = np.argsort(columns.request, kind="stable")
    counts = np.bincount(columns.request, minlength=len(columns.request_id))
    offsets = offsets_of(counts).astype(np.int32)
    lists = {
        name: pa.ListArray.from_arrays(offsets, _plain(pa, tokens[name].take(rows)))
        for name in tokens.column_names
        if name != "request_id"
    }
    requests = requests_table(columns)
    return pa.table({name: requests[name] for name in requests.column_names} | lists)


def from_sequences(sequences: Any) -> TokenColumns:
    """The columns that `sequences_table` was made of: each request's tokens one after the other.

    Raises:
      ValueError: a column is missing, as in a table of an earlier version.
    """
    pa = pyarrow()
    empty = ColumnBuilder().columns()
    names = tokens_table(empty).column_names[1:]  # without the request's id
    if missing := sorted({*names, "request_id"} - {*sequences.column_names}):
        raise _incomplete(missing)
    lists = {name: sequences[name].combine_chunks() for name in names}
    counts = lists["token_id"].value_lengths().to_numpy(zero_copy_only=False)
    ids = sequences["request_id"].combine_chunks().take(np.arange(len(counts)).repeat(counts))
    tokens = {name: column.flatten() for name, column in lists.items()}
    return from_tables(pa.table({"request_id": ids} | tokens), sequences)


def write_parquet(folder: Path | str, columns: TokenColumns) -> None:
    """Write `tokens.parquet` and `requests.parquet` into `folder`, and make it if it is missing."""
    parquet, path = pyarrow("pyarrow.parquet"), Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    parquet.write_table(tokens_table(columns), path / TOKENS)
    parquet.write_table(requests_table(columns), path / REQUESTS)


def read_parquet(folder: Path | str) -> TokenColumns:
    """Read what `write_parquet` wrote.

    Raises:
      ValueError: as `from_tables`.
    """
    parquet, path = pyarrow("pyarrow.parquet"), Path(folder)
    return from_tables(parquet.read_table(path / TOKENS), parquet.read_table(path / REQUESTS))


def pyarrow(module: str = "pyarrow") -> Any:
    """Import pyarrow, or a module of it; ModuleNotFoundError names the way out."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Arrow tables and Parquet files need pyarrow: pip install 'pyarrow>=16'",
            name=error.name,
        ) from error


def _incomplete(missing: list[str]) -> ValueError:
    return ValueError(
        f"a table lacks the columns {', '.join(missing)}: read it with the version that wrote it, "
        "or collect its records again"
    )


def _plain(pa: Any, column: Any) -> Any:
    """A column as one array; words are spelled out, as not every reader knows lists of others."""
    array = column.combine_chunks()
    return array.cast(pa.string()) if pa.types.is_dictionary(array.type) else array


def _lists(pa: Any, ragged: Ragged | KeptSets, values: NDArray[Any] | None) -> Any:
    """Arrow lists have 32-bit offsets, so a table holds at most 2**31 - 1 values in one."""
    if ragged.offsets[-1] >= 2**31:
        raise ValueError(
            f"{ragged.offsets[-1]} values in one list column, but an Arrow table holds at most "
            f"{2**31 - 1}: collect fewer requests in each table"
        )
    return pa.ListArray.from_arrays(ragged.offsets.astype(np.int32), pa.array(values))


def _ragged(ids: Any, logprobs: Any = None) -> Ragged:
    values = ids.combine_chunks()
    counts = values.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return Ragged.of(
        counts,
        values.flatten().to_numpy(zero_copy_only=False),
        None if logprobs is None else logprobs.combine_chunks().flatten().to_numpy(),
    )


def _filled(column: Any, fill: float | None) -> NDArray[Any]:
    """A column with `fill` in place of nulls; with None, it has none."""
    values: NDArray[Any] = (column if fill is None else column.fill_null(fill)).to_numpy()
    return values
