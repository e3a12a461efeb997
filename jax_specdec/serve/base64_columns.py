"""Tokens and their logprobs as arrays in base64, the field `columns` of an answer."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jax_specdec.records.record import Record
from jax_specdec.requests import ROW_VALUES, SamplingParams


def base64_columns(records: Iterable[Record], params: SamplingParams) -> dict[str, Any]:
    """The tokens of records as arrays: little-endian, in base64, each with its type and shape.

    `token_ids` [n] int32; `weights_versions` [n] uint32; where K logprobs were asked for,
    `logprobs` [n, K+1] float32 (the token's own first; -inf and NaN as they are), `token_ranks` [n]
    int32, `topk_ids` [n, K] int32; with C chosen ids `chosen_logprobs` [n, C] float32; where they
    were asked for, `entropy` and `log_sum_exp` [n] float32, `row_digest` [n] uint64; with kept sets
    those of `KeptSets`: `kept_counts` [n] int32, `log_kept` [n] float32 and `kept_token_ids` [m]
    int32, one set after the other.

    Args:
      records: of one request.
      params: what it asked for.
    """
    k, chosen = params.logprobs, len(params.extra_token_ids)
    some = [record for record in records if record.num_tokens]
    versions = [np.full(record.num_tokens, record.weights_version, np.uint32) for record in some]
    columns = {
        "token_ids": _column([record.token_ids for record in some], (), np.int32),
        "weights_versions": _column(versions, (), np.uint32),
    }
    if k is not None:
        columns |= {
            "logprobs": _column([record.logprobs for record in some], (k + 1,), np.float32),
            "token_ranks": _column([record.token_ranks for record in some], (), np.int32),
            "topk_ids": _column([record.topk_ids for record in some], (k,), np.int32),
        }
        if chosen:
            parts = [record.chosen_logprobs for record in some]
            columns["chosen_logprobs"] = _column(parts, (chosen,), np.float32)
    for name in ROW_VALUES:
        if getattr(params, name):
            columns[name] = _column([getattr(record, name) for record in some], (), np.float32)
    if params.row_digest:
        columns["row_digest"] = _column([record.row_digest for record in some], (), np.uint64)
    if params.kept_token_ids:
        sets = [record.kept for record in some if record.kept is not None]
        columns |= {
            "kept_counts": _column([record.counts for record in sets], (), np.int32),
            "log_kept": _column([record.log_kept for record in sets], (), np.float32),
            "kept_token_ids": _column([record.token_ids for record in sets], (), np.int32),
        }
    return columns


def _column(parts: Sequence[Any], shape: tuple[int, ...], dtype: type) -> dict[str, Any]:
    array = np.concatenate([np.empty((0, *shape), dtype), *parts])
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {
        "dtype": np.dtype(dtype).name,
        "shape": list(array.shape),
        "data": base64.b64encode(little.tobytes()).decode("ascii"),
    }
