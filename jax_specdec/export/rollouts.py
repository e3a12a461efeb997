"""Rollouts as one Arrow table, one row a sequence, and as the batches that learners take.

The table says all of its meaning itself: each field's metadata has a line about it (`doc`), and the
schema's its version. So Parquet files of it are read by whatever reads Arrow, without this package.
The batches are NumPy arrays under the names of verl's `DataProto` and of tunix' `TrainExample`.
"""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.arrow import pyarrow, sequences_table
from jax_specdec.export.token_columns import TokenColumns
from jax_specdec.kept_sets import offsets_of

SCHEMA_VERSION = "2"  # of the schema; a column that goes or changes its meaning raises it
OF_TOKEN = "of each emitted token, in order: "
# What each column is, by name, in the order of the table.
SCHEMA = {
    "request_id": "the request's id",
    "input_ids": "the whole sequence: prompt_token_ids, then token_id",
    "loss_mask": "one a token of input_ids: 1 where it was emitted, 0 in the prompt",
    "prompt_token_ids": "the prompt",
    "temperature": "of the sampling; 0 is greedy",
    "logprobs_mode": "the distribution that logprobs are of: raw, scaled or processed",
    "finish_reason": "why the sequence ended; null where it goes on",
    "position": OF_TOKEN + "its place in input_ids",
    "step": OF_TOKEN + "the worker's step that emitted it",
    "weights_version": OF_TOKEN + "the number of the weights that made it",
    "digest": OF_TOKEN + "a hash of what its row's bits depend on; 0: on its batch, too",
    "token_id": OF_TOKEN + "its id",
    "logprob": OF_TOKEN + "its logprob in that mode; NaN in an invalid row, null if not asked for",
    "token_rank": OF_TOKEN + "1 is the most likely; 0 in an invalid row, null if not asked for",
    "entropy": OF_TOKEN + "of the same distribution, in nats; null if not asked for",
    "log_sum_exp": OF_TOKEN + "log sum exp(logit / T) of the same; null if not asked for",
    "row_digest": OF_TOKEN + "a hash of all logits of its row; null if not asked for",
    "kind": OF_TOKEN + "plain, accepted, recovered or bonus: what verification made of it",
    "draft_token_id": OF_TOKEN + "the draft for its place; null where there was none",
    "draft_logprob": OF_TOKEN + "that draft's logprob under the draft model; null if unknown",
    "draft_token_rank": OF_TOKEN + "that draft's rank there; null if unknown",
    "topk_ids": OF_TOKEN + "the likeliest ids that are finite, most likely first",
    "topk_logprobs": OF_TOKEN + "their logprobs",
    "extra_token_ids": OF_TOKEN + "the ids that the request named",
    "chosen_logprobs": OF_TOKEN + "their logprobs",
    "draft_extra_token_ids": OF_TOKEN + "the same ids, where the draft's logprobs are known",
    "draft_chosen_logprobs": OF_TOKEN + "their logprobs under the draft model",
    "kept_count": OF_TOKEN
    + "ids it was drawn among; -1: all, -2: more than 1024; null if not asked",
    "log_kept": OF_TOKEN + "the log of their share; null if not asked for",
    "kept_token_ids": OF_TOKEN + "these ids, ascending; none where the count is a mark",
}


def rollouts_table(columns: TokenColumns) -> Any:
    """A `pyarrow.Table`, one row a request: the columns of `SCHEMA`.

    `arrow.from_sequences` makes the columns of it again.
    """
    pa = pyarrow()
    table = sequences_table(columns)
    sequences = _sequences(columns)
    lengths = np.array([len(ids) for ids in sequences], np.int64)
    prompts = np.diff(columns.prompt.offsets)
    offsets = pa.array(offsets_of(lengths), pa.int32())
    place = np.arange(int(lengths.sum())) - offsets_of(lengths)[:-1].repeat(lengths)
    mask = (place >= prompts.repeat(lengths)).astype(np.int8)
    ids = np.concatenate([np.empty(0, np.int32), *sequences])
    arrays = {name: table[name] for name in table.column_names}
    arrays["input_ids"] = pa.ListArray.from_arrays(offsets, pa.array(ids))
    arrays["loss_mask"] = pa.ListArray.from_arrays(offsets, pa.array(mask))
    rollouts = pa.table({name: arrays[name] for name in SCHEMA})
    fields = [field.with_metadata({"doc": SCHEMA[field.name]}) for field in rollouts.schema]
    return rollouts.cast(pa.schema(fields, metadata={"jax_specdec.rollouts": SCHEMA_VERSION}))


def verl_batch(
    columns: TokenColumns,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_id: int = 0,
) -> dict[str, NDArray[Any]]:
    """Rollouts as verl's `DataProto` has them: prompts padded on the left, responses on the right.

    Args:
      columns: of Q requests, of which each has logprobs.
      prompt_length: P; None: that of the longest prompt.
      response_length: N; None: that of the longest response.
      pad_id: what stands in the padding.

    Returns:
      `prompts` [Q, P], `responses` [Q, N], `input_ids`, `attention_mask` and `position_ids`
      [Q, P + N], `response_mask` [Q, N], all int64, and `rollout_log_probs` [Q, N] float32, 0 in
      the padding. Requests are in the order of `columns.request_id`.

    Raises:
      ValueError: a prompt or a response is longer, or tokens have no logprobs.
    """
    if len(columns) and (columns.token_rank < 0).any():
        index = int(columns.request[(columns.token_rank < 0).argmax()])
        raise ValueError(
            f"request {str(columns.request_id[index])!r} has tokens without logprobs, which a "
            "learner divides by: ask for logprobs = 0 at least"
        )
    prompts = _split(columns.prompt.ids, columns.prompt.offsets)
    rows = columns.rows_by_place()
    starts = np.diff(columns.prompt.offsets)
    emitted = [row[start:][row[start:] >= 0] for row, start in zip(rows, starts, strict=True)]
    prompt_ids, mask = _padded("prompt", prompts, prompt_length, pad_id, on_left=True)
    ids = [columns.token_id[places] for places in emitted]
    written, response_mask = _padded("response", ids, response_length, pad_id)
    token_logprobs = [columns.logprob[places] for places in emitted]
    logprobs, _ = _padded("response", token_logprobs, written.shape[1], 0.0)
    attention = np.concatenate([mask, response_mask], axis=1)
    return {
        "prompts": prompt_ids.astype(np.int64),
        "responses": written.astype(np.int64),
        "input_ids": np.concatenate([prompt_ids, written], axis=1).astype(np.int64),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "response_mask": response_mask,
        "rollout_log_probs": logprobs.astype(np.float32),
    }


def tunix_batch(
    columns: TokenColumns,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_id: int = 0,
) -> dict[str, NDArray[Any]]:
    """Rollouts as tunix' `TrainExample` has them, but for what only a learner knows.

    Arguments and errors are those of `verl_batch`.

    Returns:
      `prompt_ids` [Q, P] and `completion_ids` [Q, N] int32, `prompt_mask` and `completion_mask`
      bool, `old_per_token_logps` [Q, N] float32.
    """
    batch = verl_batch(
        columns, prompt_length=prompt_length, response_length=response_length, pad_id=pad_id
    )
    width = batch["prompts"].shape[1]
    return {
        "prompt_ids": batch["prompts"].astype(np.int32),
        "prompt_mask": batch["attention_mask"][:, :width].astype(np.bool_),
        "completion_ids": batch["responses"].astype(np.int32),
        "completion_mask": batch["response_mask"].astype(np.bool_),
        "old_per_token_logps": batch["rollout_log_probs"],
    }


def _sequences(columns: TokenColumns) -> list[NDArray[np.int32]]:
    """Each request's prompt and tokens."""
    order = np.argsort(columns.request, kind="stable")
    counts = np.bincount(columns.request, minlength=len(columns.request_id))
    emitted = _split(columns.token_id[order], offsets_of(counts))
    prompts = _split(columns.prompt.ids, columns.prompt.offsets)
    return [np.concatenate(pair) for pair in zip(prompts, emitted, strict=True)]


def _split(values: NDArray[Any], offsets: NDArray[np.int64]) -> list[NDArray[Any]]:
    bounds = offsets.tolist()
    return [values[begin:end] for begin, end in itertools.pairwise(bounds)]


def _padded(
    name: str, rows: list[NDArray[Any]], length: int | None, fill: float, *, on_left: bool = False
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Rows [Q, length], and 1 where they have a value, else 0."""
    longest = max(map(len, rows), default=0)
    if length is not None and length < longest:
        raise ValueError(
            f"a {name} has {longest} tokens, more than {name}_length = {length}: raise it, or "
            "leave longer rollouts out"
        )
    width = longest if length is None else length
    dtype = rows[0].dtype if rows else np.dtype(np.int32)
    table, there = np.full((len(rows), width), fill, dtype), np.zeros((len(rows), width), np.int64)
    for row, values in enumerate(rows):
        place = slice(width - len(values), width) if on_left else slice(0, len(values))
        table[row, place], there[row, place] = values, 1
    return table, there
