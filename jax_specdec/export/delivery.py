"""A request's records as its reader gets them: text beside tokens, cut at a stop string.

A record is held back while a stop string may begin in its text, and with it its logprobs: nothing
is sent that a later token would take back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_specdec.records.batch import FinishReason
from jax_specdec.records.record import Record
from jax_specdec.text.detokenize import TextStream, TokenTable
from jax_specdec.text.stop_strings import StopStrings


@dataclass(frozen=True)
class DeliveryPart:
    """A record to be sent.

    Attributes:
      record: with the tokens that are sent; where a stop string ends the text, the
        last one has the reason `STOP_STRING`.
      text: what they complete.
      offsets: where each of them begins in the text, in characters.
    """

    record: Record
    text: str
    offsets: Sequence[int]


@dataclass(frozen=True)
class _Held:
    """A record whose text is [begin, end); it may go once the text is certain up to `needs`."""

    record: Record
    offsets: Sequence[int]
    begin: int
    end: int
    needs: int


class Delivery:
    """Takes the records of a request in their order.

    Attributes:
      found: the stop string that ended the text; then no further record may be given.
    """

    def __init__(
        self,
        table: TokenTable,
        stops: Sequence[str] = (),
        *,
        keep: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Begin a text.

        Args:
          table: the strings of the tokenizer.
          stops: strings that end the text.
          keep: the string that ends it belongs to it.
          min_tokens: the text of so many first tokens completes none of them.
        """
        self._table, self._stream = table, TextStream(table)
        self._stops = StopStrings(stops, keep=keep) if stops else None
        self._held: list[_Held] = []
        self._min_tokens, self._num_tokens = min_tokens, 0  # looked at for stop strings
        self._sum = 0.0  # the logprobs of what was sent

    @property
    def stop_text(self) -> str | None:
        return None if self._stops is None else self._stops.found

    def push(self, record: Record) -> list[DeliveryPart]:
        """The parts that can be sent now; after the last record, all that is left."""
        over = record.finish_reason is not None
        begin, ids = self._stream.length, record.token_ids.tolist()
        if self._stops is None:
            text, offsets = self._stream.push_with_offsets(ids)
            return [DeliveryPart(record, text + (self._stream.finish() if over else ""), offsets)]
        offsets = []
        for token_id in ids:  # one by one: nothing depends on how many came together
            text, places = self._stream.push_with_offsets([token_id])
            offsets += places
            self._num_tokens += 1
            self._stops.push(text, may_end=self._num_tokens > self._min_tokens)
            if self._stops.end is not None:
                break
        else:
            if over:
                may_end = self._num_tokens > self._min_tokens
                self._stops.push(self._stream.finish(), may_end=may_end)
        end = self._stream.length
        self._held.append(_Held(record, offsets, begin, end, end + self._stream.inside_character))
        if self._stops.end is not None:
            return self._cut(self._stops.end)
        parts = []
        certain = self._stops.certain
        while self._held and (over or self._held[0].needs <= certain):
            parts.append(self._part(self._held.pop(0)))
        return parts

    def _cut(self, end: int) -> list[DeliveryPart]:
        """The rest of the records that were held, the last one with the reason of the end.

        Tokens that begin behind the end are cut. A token without text stays where it stands before
        the first token that is cut.
        """
        open_, counts = True, list[int]()
        for held in self._held:
            count = 0
            for token_id, offset in zip(held.record.token_ids.tolist(), held.offsets, strict=False):
                open_ = open_ and (offset < end or not self._table.text_bytes[token_id])
                count += open_
            if count or held.begin < end or not counts:
                counts.append(count)
        *complete, last = self._held[: len(counts)]
        self._held.clear()
        parts = [self._part(held) for held in complete]
        record, count = last.record, counts[-1]
        rows = record.logprobs
        total = 0.0 if rows is None else float(rows[:count, 0].astype(np.float64).sum())
        cut = record.cut(count, self._sum + total, FinishReason.STOP_STRING)
        return [
            *parts,
            self._part(replace(last, record=cut, offsets=last.offsets[:count], end=end)),
        ]

    def _part(self, held: _Held) -> DeliveryPart:
        assert self._stops is not None
        total = held.record.cumulative_logprob
        self._sum = self._sum if total is None else total
        return DeliveryPart(held.record, self._stops.text[held.begin : held.end], held.offsets)
