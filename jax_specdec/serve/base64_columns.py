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
    versions = [np.full(one.num_tokens, one.weights_version, np.uint32) for one in some]
    found = {
        "token_ids": _column([one.token_ids for one in some], (), np.int32),
        "weights_versions": _column(versions, (), np.uint32),
    }
    if k is not None:
        found |= {
            "logprobs": _column([one.logprobs for one in some], (k + 1,), np.float32),
            "token_ranks": _column([one.token_ranks for one in some], (), np.int32),
            "topk_ids": _column([one.topk_ids for one in some], (k,), np.int32),
        }
        if chosen:
            parts = [one.chosen_logprobs for one in some]
            found["chosen_logprobs"] = _column(parts, (chosen,), np.float32)
    for name in ROW_VALUES:
        if getattr(params, name):
            found[name] = _column([getattr(one, name) for one in some], (), np.float32)
    if params.row_digest:
        found["row_digest"] = _column([one.row_digest for one in some], (), np.uint64)
    if params.kept_token_ids:
        sets = [one.kept for one in some if one.kept is not None]
        found |= {
            "kept_counts": _column([one.counts for one in sets], (), np.int32),
            "log_kept": _column([one.log_kept for one in sets], (), np.float32),
            "kept_token_ids": _column([one.token_ids for one in sets], (), np.int32),
        }
    return found


def _column(parts: Sequence[Any], shape: tuple[int, ...], dtype: type) -> dict[str, Any]:
    array = np.concatenate([np.empty((0, *shape), dtype), *parts])
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {
        "dtype": np.dtype(dtype).name,
        "shape": list(array.shape),
        "data": base64.b64encode(little.tobytes()).decode("ascii"),
    }
