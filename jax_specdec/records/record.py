"""Records: the columns of a step as objects, one a request, made only when touched.

A `RecordBatch` holds the columns of one step, a `Records` the batches that one call released. A
`Record` is a light view of one request's row in them, and `TokenRows` a view of the tokens or the
drafts that a message has for it. Arrays are views of the message's own buffer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ipc import wire
from ipc.wire import RowValue, SlotState
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.batch import FinishReason, PromptRows, RecordBatch, Statistics
from jax_specdec.records.decode import Message
from jax_specdec.requests import Request, SamplingParams


# Not frozen: it would take twice as long to make.
@dataclass(slots=True, eq=False)
class Records:
    """The records that one call released: a sequence of `Record`, made when touched.

    There is one batch for each step with something to deliver, oldest first: usually one, two
    when records that waited for a draft message leave with those of the next step.
    """

    batches: tuple[RecordBatch, ...] = ()

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def __iter__(self) -> Iterator["Record"]:
        return chain.from_iterable(map(_records_of, self.batches))

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

    def _repr_html_(self) -> str:
        """HTML for a notebook: token ids, colored by logprob."""
        from jax_specdec.records.notebook import fragment

        return fragment(self)

    def events(self) -> Iterator["Record"]:
        """The records that a scheduler must act on: finished, or to be scheduled again."""
        for batch in self.batches:
            if batch.totals is not None:
                for index in np.flatnonzero((batch.finish_reason > 0) | batch.reschedule).tolist():
                    yield Record(batch, index)


class TokenViews:
    """Views of n tokens of a message's slot and their logprobs, read-only, made on access."""

    __slots__ = ()

    def _viewed(self) -> tuple[Message | None, int, int, SamplingParams]:
        """The message, the slot, n, and what the slot's request asked for; n = 0 without one."""
        raise NotImplementedError

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[n] int32."""
        return self._ids()

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """[n, K+1] float32, the token itself first, then the top K; None if none were asked."""
        return self._rows(chosen=False)

    @property
    def chosen_logprobs(self) -> NDArray[np.float32] | None:
        """[n, C] float32, of the request's `extra_token_ids`; None if no logprobs were asked."""
        return self._rows(chosen=True)

    @property
    def token_ranks(self) -> NDArray[np.int32] | None:
        """[n] int32, 1 is the most likely token, 0 marks an invalid row; None if none asked."""
        return self._ranks()

    @property
    def topk_ids(self) -> NDArray[np.int32] | None:
        """[n, K] int32, most likely first, -1 where fewer than K are finite; None if none asked."""
        return self._top()

    @property
    def entropy(self) -> NDArray[np.float32] | None:
        """[n] float32, in nats, in the mode of the logprobs; None if none were asked."""
        return self._value(RowValue.ENTROPY)

    @property
    def log_sum_exp(self) -> NDArray[np.float32] | None:
        """[n] float32, of logit / T over the same distribution; None if none were asked."""
        return self._value(RowValue.LOG_SUM_EXP)

    @property
    def row_digest(self) -> NDArray[np.uint64] | None:
        """[n] uint64, of all logits of each token's row; None if none were asked.

        `pallas_kernels.equal_digests` compares them with those of other logits.
        """
        low, high = self._value(RowValue.DIGEST_LOW), self._value(RowValue.DIGEST_HIGH)
        if low is None or high is None:
            return None
        return digests_of(low, high)

    def _ids(self) -> NDArray[np.int32]:
        message, slot, n, _ = self._viewed()
        if message is None:
            return _NO_IDS
        start = message.token_start[slot]
        return message.token_ids[start : start + n]

    def _ranks(self) -> NDArray[np.int32] | None:
        message, slot, n, params = self._viewed()
        if params.logprobs is None:
            return None
        if message is None:
            return _NO_IDS
        start = message.row_start[slot]
        return message.token_ranks[start : start + n]

    def _top(self) -> NDArray[np.int32] | None:
        message, slot, n, params = self._viewed()
        k = params.logprobs
        if k is None:
            return None
        if message is None:
            return _NO_IDS.reshape(0, k)
        start = message.topk_start[slot]
        return message.topk_ids[start : start + n * k].reshape(n, k)

    def _rows(self, chosen: bool) -> NDArray[np.float32] | None:
        params = self._viewed()[3]
        columns = params.num_columns
        if not columns:
            return None
        rows, end = self._table(), columns + len(params.extra_token_ids)
        return rows[:, columns:end] if chosen else rows[:, :columns]

    def _value(self, value: RowValue) -> NDArray[np.float32] | None:
        _, _, n, params = self._viewed()
        if not params.row_values >> value & 1:
            return None
        if not n:
            return _NO_VALUES
        place = params.num_columns + len(params.extra_token_ids)
        place += wire.place_of_value(params.row_values, value)
        values = self._table()[:, place : place + 1]
        return values[:, 0] if values.shape[1] else None

    def _table(self) -> NDArray[np.float32]:
        """[n, width] all that the message has of the rows of logprobs."""
        message, slot, n, params = self._viewed()
        width = params.num_columns + len(params.extra_token_ids)
        if message is None:
            return np.empty((0, width), np.float32)
        width += wire.num_values(int(message.values[slot]))
        start = message.logprob_start[slot]
        return message.logprobs[start : start + n * width].reshape(n, width)


class TokenRows(TokenViews):
    """n drafts of a message's slot and their logprobs. Arrays are read-only views, made on access.

    Axes: n tokens, K top columns, C chosen ids. Where no logprobs were asked, all but the ids are
    None.
    """

    __slots__ = ("_what",)

    def __init__(self, message: Message, slot: int, count: int, params: SamplingParams) -> None:
        """View `count` tokens of `slot`, whose request asked for `params`."""
        self._what = message, slot, count, params

    def _viewed(self) -> tuple[Message | None, int, int, SamplingParams]:
        return self._what


# The arrays that a record holds once they were read. Where a step's rows are alike, it has them
# from the start: who reads the records one by one waits for little else than NumPy's views.
_ARRAYS = ("token_ids", "token_ranks", "logprobs", "topk_ids")


class Record(TokenViews):
    """One request's part of one step: n tokens. Arrays are read-only views, made on access.

    A record keeps the whole message of its step in memory: copy what must outlive many steps.
    """

    __slots__ = {
        "batch": "The records of the step.",
        "index": "Which of them this is.",
        **{name: getattr(TokenViews, name).__doc__ for name in _ARRAYS},
    }

    # A frozen dataclass takes three times as long to make, and a step has hundreds.
    def __init__(
        self,
        batch: RecordBatch,
        index: int,
        token_ids: NDArray[np.int32] | None = None,
        token_ranks: NDArray[np.int32] | None = None,
        logprobs: NDArray[np.float32] | None = None,
        topk_ids: NDArray[np.int32] | None = None,
    ) -> None:
        """View row `index` of a step's records; with ids, all its arrays are made."""
        self.batch = batch
        self.index = index
        if token_ids is not None:
            arrays = token_ids, token_ranks, logprobs, topk_ids
            self.token_ids, self.token_ranks, self.logprobs, self.topk_ids = arrays  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """An array that was not read before."""
        if name not in _ARRAYS:
            raise AttributeError(f"a record has no attribute {name!r}")
        views = self.batch.views
        array = None if views is None else getattr(views, name)[self.index]
        if array is None:
            array = getattr(TokenViews, name).fget(self)
        setattr(self, name, array)
        return array

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
    def weights_version(self) -> int | None:
        """Of the weights that made the tokens, or the prompt's rows; None without a message.

        `Engine.update_weights` raises it. All rows of a record are of one version.
        """
        return self.batch.weights_version

    @property
    def digest(self) -> int:
        """Of what the rows' bits depend on (`sequence_logprobs`); 0 where it is the batch, too."""
        return self.batch.digest

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
    def valid(self) -> NDArray[np.bool_] | None:
        """[n] bool, False where the row had a NaN, +inf or nothing finite; None if none asked."""
        ranks = self.token_ranks
        return None if ranks is None else ranks != 0

    @property
    def kept(self) -> KeptSets | None:
        """The n tokens' kept sets: ids, counts, log of the kept share; None if none were asked.

        A set describes the processed distribution, whatever mode the logprobs have.
        """
        if not self.request.params.kept_token_ids:
            return None
        message = self.batch.message
        return _NO_KEPT if message is None else message.kept_of(self.slot, self.num_tokens)

    @property
    def draft(self) -> TokenRows | None:
        """The d drafts that this step verified, under the draft model; None without their message.

        All of them, accepted or not: n is `num_drafts` here.
        """
        joined, message = self.batch.joined, self.batch.draft
        if message is None or joined is None or not joined[self.index]:
            return None
        num_drafts = int(message.num_tokens[self.slot])
        return TokenRows(message, self.slot, num_drafts, self.request.params)

    @property
    def prompt(self) -> PromptRows | None:
        """A part of the prompt's logprobs, in a record without tokens; None in all others.

        The parts come in order, and before the first token.
        """
        prompt = self.batch.prompt
        return None if prompt is None else prompt.rows(self.index, self.slot)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over all tokens so far; NaN after an invalid row, None if none were asked."""
        if not self.request.params.num_columns:
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
        """Whether the request was preempted: schedule it again, after its last token."""
        return bool(self.batch.reschedule[self.index])

    @property
    def handover_draft_ids(self) -> NDArray[np.int32] | None:
        """[d] int32, drafts for the next step that came with a prefill's first token.

        None in any other record, and where the request ended for another reason than the hand-over.
        """
        message = self.batch.message
        if message is None or message.state[self.slot] != SlotState.PREFILL_FIRST_TOKEN:
            return None
        if self.finish_reason not in (None, FinishReason.PREFILL_HANDOVER):
            return None
        start = message.token_start[self.slot]
        return message.token_ids[start + 1 : start + message.num_tokens[self.slot]]

    @property
    def statistics(self) -> Statistics | None:
        """The request's statistics, earlier stays included; None before the end of a stay."""
        if self.batch.totals is None or not (self.finish_reason or self.reschedule):
            return None
        return self.batch.totals.of(self.slot)

    def _repr_html_(self) -> str:
        """HTML for a notebook: token ids, colored by logprob."""
        from jax_specdec.records.notebook import fragment

        return fragment([self])

    def cut(self, count: int, cumulative_logprob: float, reason: FinishReason) -> "Record":
        """The record with only its first `count` tokens, where a text ended among them.

        Args:
          count: tokens to keep.
          cumulative_logprob: of all tokens up to these.
          reason: why it ended.
        """
        batch = replace(
            self.batch.take(np.array([self.index])),
            num_tokens=np.array([count]),
            cumulative_logprob=np.array([cumulative_logprob]),
            finish_reason=np.array([reason], np.int8),
        )
        return Record(batch, 0)

    def _viewed(self) -> tuple[Message | None, int, int, SamplingParams]:
        batch, slot = self.batch, self.slot
        return batch.message, slot, int(batch.num_tokens[self.index]), self.request.params


def _records_of(batch: RecordBatch) -> Iterator[Record]:
    message, indices = batch.message, range(len(batch))
    views = batch.views if message is not None and message.same_columns is not None else None
    if views is None:  # some look up their arrays themselves
        return map(Record, repeat(batch), indices)
    return map(Record, repeat(batch), indices, *views)


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_IDS.flags.writeable = False


def digests_of(low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Digests [n] of their two halves, whose bits stand in a message as floats."""
    halves = np.empty((len(low), 2), np.float32)
    halves[:, 0], halves[:, 1] = low, high
    return halves.view("<u8")[:, 0]


_NO_VALUES: NDArray[np.float32] = np.empty(0, np.float32)
_NO_VALUES.flags.writeable = False
_NO_KEPT = KeptSets.none()
