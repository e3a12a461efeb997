"""What a step delivered, per request: columns first, objects only when touched. Never jax.

A `RecordBatch` holds the columns of one step, a `Records` the batches that one call released, and
a `Record` is a light view of one request's row. Arrays are views of the message's own buffer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ipc.wire import SlotState
from jax_specdec.records.batch import FinishReason, PromptRows, RecordBatch
from jax_specdec.records.decode import Message
from jax_specdec.records.statistics import Statistics
from jax_specdec.requests import Request


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """What one call released: a sequence of `Record`, made when touched.

    There is one batch for each step with something to deliver, oldest first: usually one, two
    when records that waited for a draft message leave with those of the next step.
    """

    batches: tuple[RecordBatch, ...] = ()

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def __iter__(self) -> Iterator["Record"]:
        for batch in self.batches:
            for index in range(len(batch)):
                yield Record(batch, index)

    def __getitem__(self, index: int) -> "Record":
        """Record `index`, counted over all batches; negative from the end.

        Raises:
          IndexError: there is no such record.
        """
        at = index + len(self) if index < 0 else index
        for batch in self.batches:
            if 0 <= at < len(batch):
                return Record(batch, at)
            at -= len(batch)
        raise IndexError(f"record {index} of {len(self)}")

    def events(self) -> Iterator["Record"]:
        """The records that a scheduler must act on: finished, or to be scheduled again."""
        for batch in self.batches:
            if batch.totals is not None:
                for index in np.flatnonzero((batch.finish_reason > 0) | batch.reschedule).tolist():
                    yield Record(batch, index)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One request's part of one step: n tokens. Arrays are read-only views, made on access.

    A record keeps the whole message of its step in memory: copy what must outlive many steps.
    """

    batch: RecordBatch
    index: int

    @property
    def request(self) -> Request:
        request = self.batch.requests[self.slot]
        assert request is not None  # a record exists only for an occupied slot
        return request

    @property
    def request_id(self) -> str:
        return self.request.id

    @property
    def slot(self) -> int:
        return int(self.batch.slots[self.index])

    @property
    def generation(self) -> int:
        return int(self.batch.generation[self.index])

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def num_tokens(self) -> int:
        return int(self.batch.num_tokens[self.index])

    @property
    def num_drafts(self) -> int:
        """Drafts that this step verified."""
        return int(self.batch.num_drafts[self.index])

    @property
    def num_accepted(self) -> int:
        """Drafts that it accepted, also those that a stop then cut.

        Token j was a draft where j < num_accepted; the one at num_accepted is the recovered token,
        or the bonus token where num_accepted == num_drafts.
        """
        return int(self.batch.num_accepted[self.index])

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[n] int32."""
        message = self.batch.message
        if message is None:
            return _NO_IDS
        start = message.token_start[self.slot]
        return message.token_ids[start : start + self.num_tokens]

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """[n, K+1] float32, the emitted token first, then the top K; None if none were asked."""
        rows, params = self._rows, self.request.params
        if rows is None or not params.extra_token_ids:
            return rows
        return rows[:, : params.num_columns]

    @property
    def chosen_logprobs(self) -> NDArray[np.float32] | None:
        """[n, C] float32, of the request's `extra_token_ids`; None if no logprobs were asked."""
        rows = self._rows
        return None if rows is None else rows[:, self.request.params.num_columns :]

    @property
    def token_ranks(self) -> NDArray[np.int32] | None:
        """[n] int32, 1 is the most likely token, 0 marks an invalid row; None if none asked."""
        if self.request.params.num_columns == 0:
            return None
        message = self.batch.message
        if message is None:
            return _NO_IDS
        start = message.row_start[self.slot]
        return message.token_ranks[start : start + self.num_tokens]

    @property
    def topk_ids(self) -> NDArray[np.int32] | None:
        """[n, K] int32, most likely first, -1 where fewer than K are finite; None if none asked."""
        k = self.request.params.num_columns - 1
        if k < 0:
            return None
        message = self.batch.message
        if message is None:
            return _NO_IDS.reshape(0, k)
        start, n = message.topk_start[self.slot], self.num_tokens
        return message.topk_ids[start : start + n * k].reshape(n, k)

    @property
    def valid(self) -> NDArray[np.bool_] | None:
        """[n] bool, False where the row had a NaN, +inf or nothing finite; None if none asked."""
        ranks = self.token_ranks
        return None if ranks is None else ranks != 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all tokens so far; NaN once a row was invalid, None if no logprobs were asked."""
        if self.request.params.num_columns == 0:
            return None
        return float(self.batch.cumulative_logprob[self.index])

    @property
    def finish_reason(self) -> FinishReason | None:
        reason = int(self.batch.finish_reason[self.index])
        return FinishReason(reason) if reason else None

    @property
    def stop_token_id(self) -> int | None:
        """The token that ended the request, where one did."""
        if self.finish_reason is not FinishReason.STOP_TOKEN:
            return None
        return int(self.batch.stop_index[self.index])

    @property
    def stop_sequence(self) -> tuple[int, ...] | None:
        """The sequence that ended the request, where one did."""
        if self.finish_reason is not FinishReason.STOP_SEQUENCE:
            return None
        return self.request.params.stop_sequences[self.batch.stop_index[self.index]]

    @property
    def reschedule(self) -> bool:
        """The request was preempted: schedule it again, going on after its last token."""
        return bool(self.batch.reschedule[self.index])

    @property
    def handover_draft_ids(self) -> NDArray[np.int32] | None:
        """[d] int32, drafts for the next step that came with a prefill's first token.

        None in any other record, and where nobody goes on: the request ended for another reason
        than the hand-over.
        """
        message = self.batch.message
        if message is None or message.state[self.slot] != SlotState.PREFILL_FIRST_TOKEN:
            return None
        if self.finish_reason not in (None, FinishReason.PREFILL_HANDOVER):
            return None
        start = message.token_start[self.slot]
        return message.token_ids[start + 1 : start + message.num_tokens[self.slot]]

    @property
    def prompt(self) -> PromptRows | None:
        """A part of the prompt's logprobs; such a record has no tokens, all others have None here.

        They come in order, and before the first token.
        """
        return self.batch.prompt_rows(self.index)

    @property
    def statistics(self) -> Statistics | None:
        """Of the request so far, earlier stays included; None until the record that ends a stay."""
        if self.batch.totals is None or not (self.finish_reason or self.reschedule):
            return None
        return self.batch.totals.of(self.slot)

    @property
    def draft_token_ids(self) -> NDArray[np.int32] | None:
        """[d] int32, the drafts that this step verified, where their message came."""
        draft = self._draft
        if draft is None:
            return None
        start = draft.token_start[self.slot]
        return draft.token_ids[start : start + draft.num_tokens[self.slot]]

    @property
    def draft_logprobs(self) -> NDArray[np.float32] | None:
        """[d, K+1] float32, under the draft model; as `logprobs`."""
        draft = self._draft_rows
        return None if draft is None else self._draft_table(draft)[:, : draft.columns[self.slot]]

    @property
    def draft_chosen_logprobs(self) -> NDArray[np.float32] | None:
        """[d, C] float32, under the draft model; as `chosen_logprobs`."""
        draft = self._draft_rows
        return None if draft is None else self._draft_table(draft)[:, draft.columns[self.slot] :]

    @property
    def draft_token_ranks(self) -> NDArray[np.int32] | None:
        """[d] int32, under the draft model."""
        draft = self._draft_rows
        if draft is None:
            return None
        start = draft.row_start[self.slot]
        return draft.token_ranks[start : start + draft.num_rows[self.slot]]

    @property
    def draft_topk_ids(self) -> NDArray[np.int32] | None:
        """[d, K] int32, under the draft model."""
        draft = self._draft_rows
        if draft is None:
            return None
        start, n = draft.topk_start[self.slot], int(draft.num_rows[self.slot])
        k = int(draft.columns[self.slot]) - 1
        return draft.topk_ids[start : start + n * k].reshape(n, k)

    @property
    def _rows(self) -> NDArray[np.float32] | None:
        """[n, K+1+C] float32."""
        params, n, message = self.request.params, self.num_tokens, self.batch.message
        if params.num_columns == 0:
            return None
        width = params.num_columns + len(params.extra_token_ids)
        if message is None or not n:  # a slot without tokens has no columns in its message
            return np.empty((0, width), np.float32)
        start = message.logprob_start[self.slot]
        return message.logprobs[start : start + n * width].reshape(n, width)

    def _draft_table(self, draft: Message) -> NDArray[np.float32]:
        """[d, K+1+C] float32."""
        slot, n = self.slot, int(draft.num_rows[self.slot])
        width, start = int(draft.columns[slot] + draft.num_chosen[slot]), draft.logprob_start[slot]
        return draft.logprobs[start : start + n * width].reshape(n, width)

    @property
    def _draft(self) -> Message | None:
        joined = self.batch.joined
        return self.batch.draft if joined is not None and joined[self.index] else None

    @property
    def _draft_rows(self) -> Message | None:
        draft = self._draft
        return draft if draft is not None and draft.columns[self.slot] else None


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_IDS.flags.writeable = False
