"""Tokens of many requests as NumPy arrays, one row a token.

`column_builder.py` makes these values; reading them takes NumPy alone.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.kept_sets import KeptSets, offsets_of
from jax_specdec.requests import ROW_FIELDS

TOKEN_KINDS = ("plain", "accepted", "recovered", "bonus")  # the words of `TokenColumns.kind`
NO_RANK = -1  # in `TokenColumns.token_rank`


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """One list a row: that of row i is `ids[offsets[i] : offsets[i + 1]]`.

    Attributes:
      offsets: [N+1] int64, from 0.
      ids: [M] int32, the lists one after the other.
      logprobs: [M] float32, one for each id; None for ids without logprobs (a prompt's).
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None

    @classmethod
    def of(
        cls,
        counts: NDArray[np.int64],
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float32] | None = None,
    ) -> "Ragged":
        """Lists of `counts` [N] values each, one after the other."""
        return cls(offsets_of(counts), ids, logprobs)

    def take(self, rows: NDArray[np.intp]) -> "Ragged":
        """The lists of `rows`, which must ascend."""
        counts = np.diff(self.offsets)
        keep = np.zeros(len(counts), np.bool_)
        keep[rows] = True
        cells = np.repeat(keep, counts)
        logprobs = None if self.logprobs is None else self.logprobs[cells]
        return Ragged.of(counts[rows], self.ids[cells], logprobs)

    def dense(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and logprobs as [N, K], K the longest list; -1 and -inf pad the shorter ones."""
        counts = np.diff(self.offsets)
        there = np.arange(counts.max(initial=0)) < counts[:, None]
        ids = np.full(there.shape, -1, np.int32)
        logprobs = np.full(there.shape, -np.inf, np.float32)
        ids[there] = self.ids
        if self.logprobs is not None:
            logprobs[there] = self.logprobs
        return ids, logprobs


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenColumns:
    """N tokens of Q requests: a request's own are in order, among those of the others.

    Attributes:
      request_id: [Q] str, in the order of their first records.
      prompt: each request's prompt ids.
      temperature: [Q] float64, as requested.
      logprobs_mode: [Q] int8 `LogprobsMode`, the distribution that its logprobs describe.
      finish_reason: [Q] int8 `FinishReason`; 0 for a request that has not ended.
      request: [N] int32, the index of the token's request.
      position: [N] int64, the token's place in its sequence; the first after the prompt is at
        the prompt's length.
      step: [N] int64, the step that emitted it.
      weights_version: [N] uint32, of the weights that made the token.
      digest: [N] uint16, of what the bits of the token's row depend on; 0 where on its batch, too.
      token_id: [N] int32.
      logprob: [N] float32; NaN in an invalid row, and where no logprobs were asked for.
      token_rank: [N] int32, 1 for the most likely; 0 in an invalid row, NOT_ASKED where no
        logprobs were asked for.
      entropy, log_sum_exp: [N] float32, of the distribution that the logprob is from; NaN in an
        invalid row, and where they were not asked for.
      row_digest: [N] uint64, of all logits of the token's row; 0 where it was not asked for.
      kind: [N] int8, an index of KINDS: what the token was to verification.
      draft_token_id: [N] int32, the draft proposed for this position; -1 where there was none, or
        its message did not come. Drafts after the first rejected one have no position here.
      draft_logprob: [N] float32, that draft's logprob under the draft model; NaN where unknown.
      draft_token_rank: [N] int32, its rank there; NOT_ASKED where unknown.
      topk: each token's top K that are finite, most likely first.
      chosen: each token's logprobs of the request's `extra_token_ids`.
      draft_chosen: logprobs of the same ids under the draft model, from the row that the draft
        was proposed from; an empty list where `draft_logprob` is unknown.
      kept: each token's kept set; a count of 0 where its request asked for none.
    """

    request_id: NDArray[np.str_]
    prompt: Ragged
    temperature: NDArray[np.float64]
    logprobs_mode: NDArray[np.int8]
    finish_reason: NDArray[np.int8]
    request: NDArray[np.int32]
    position: NDArray[np.int64]
    step: NDArray[np.int64]
    weights_version: NDArray[np.uint32]
    digest: NDArray[np.uint16]
    token_id: NDArray[np.int32]
    logprob: NDArray[np.float32]
    token_rank: NDArray[np.int32]
    entropy: NDArray[np.float32]
    log_sum_exp: NDArray[np.float32]
    row_digest: NDArray[np.uint64]
    kind: NDArray[np.int8]
    draft_token_id: NDArray[np.int32]
    draft_logprob: NDArray[np.float32]
    draft_token_rank: NDArray[np.int32]
    topk: Ragged
    chosen: Ragged
    draft_chosen: Ragged
    kept: KeptSets

    def __len__(self) -> int:
        return len(self.token_id)

    def of_request(self, index: int) -> "TokenColumns":
        """The rows of one request, in order; the columns of requests [Q] stay whole."""
        rows = np.flatnonzero(self.request == index)
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in TOKEN_COLUMNS}
        taken |= {name: getattr(self, name).take(rows) for name in (*TOKEN_LISTS, "kept")}
        return replace(self, **taken)

    def rows_by_place(self, length: int | None = None) -> NDArray[np.intp]:
        """Which row holds the token at each place of each request's sequence.

        Args:
          length: L; None: that of the longest sequence.

        Returns:
          [Q, L]; -1 in prompts and behind ends. So `kept.padded(rows)` and, where it is not -1,
          `logprob[rows]` have the shape of a learner's batch.

        Raises:
          ValueError: a sequence is longer than `length`.
        """
        longest = int(max(np.diff(self.prompt.offsets).max(initial=0),
                          (self.position + 1).max(initial=0)))  # fmt: skip
        if length is not None and length < longest:
            raise ValueError(f"a sequence has {longest} tokens, more than length = {length}")
        rows = np.full((len(self.request_id), longest if length is None else length), -1, np.intp)
        rows[self.request, self.position] = np.arange(len(self))
        return rows


TOKEN_COLUMNS = {
    "request": np.int32,
    "position": np.int64,
    "step": np.int64,
    "weights_version": np.uint32,
    "digest": np.uint16,
    "token_id": np.int32,
    "logprob": np.float32,
    "token_rank": np.int32,
    "entropy": np.float32,
    "log_sum_exp": np.float32,
    "row_digest": np.uint64,
    "kind": np.int8,
    "draft_token_id": np.int32,
    "draft_logprob": np.float32,
    "draft_token_rank": np.int32,
}
# Lists of a token: their column of ids in an Arrow table, by the name that a request has for them.
TOKEN_LISTS = {
    "topk": "topk_ids", "chosen": "extra_token_ids", "draft_chosen": "draft_extra_token_ids",
}  # fmt: skip
# What stands for a token whose request did not ask, or for a draft that is not known.
FILLS = {
    "logprob": np.nan, "token_rank": NO_RANK, "draft_token_id": -1, "draft_logprob": np.nan,
    "draft_token_rank": NO_RANK, "entropy": np.nan, "log_sum_exp": np.nan, "row_digest": 0,
}  # fmt: skip
# By a -1 in which column one knows where each has such a value.
KNOWN_BY = {name: name for name in FILLS if name not in ROW_FIELDS} | {
    "logprob": "token_rank", "draft_logprob": "draft_token_rank",
}  # fmt: skip
