"""One choice of an answer, as JSON: whole, or in the chunks of a stream."""

from collections.abc import Sequence
from typing import Any

from jax_specdec.export import openai
from jax_specdec.export.delivery import DeliveryPart
from jax_specdec.export.openai_extension import request_extension, speculation
from jax_specdec.records.batch import FinishReason, PromptRows
from jax_specdec.records.record import Record
from jax_specdec.requests import Request
from jax_specdec.serve.base64_columns import base64_columns
from jax_specdec.serve.model import ServedModel
from jax_specdec.serve.parse_request import ParsedRequest
from jax_specdec.serve.tools import CallReader
from jax_specdec.text.detokenize import TextStream, TokenTable


def vllm_prompt_logprobs(rows: PromptRows, table: TokenTable) -> list[dict[str, Any] | None]:
    """One object a prompt token: its id and those of the top K to logprob, rank and text.

    The prompt's first token, where `rows` begin behind it, has None.
    """
    entries: list[dict[str, Any] | None] = [None] if rows.start == 1 else []
    ranks = rows.token_ranks.tolist()
    for (token_id, (logprob, *values), ids), rank in zip(
        openai.positions(rows), ranks, strict=True
    ):
        entry = {str(token_id): _entry(logprob, rank, token_id, table)}
        for place, (candidate, value) in enumerate(zip(ids, values, strict=False), 1):
            if candidate != token_id:
                entry[str(candidate)] = _entry(value, place, candidate, table)
        entries.append(entry)
    return entries


def _entry(logprob: float | None, rank: int, token_id: int, table: TokenTable) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": table.text[token_id]}


class Choice:
    """The results of one request so far, in the words of the API.

    Attributes:
      index: the choice's number in the answer.
      num_tokens: tokens of its text.
      min_tokens: those of them before which it does not end.
      structured: the request says what its text must be.
    """

    def __init__(
        self, index: int, request: Request, parsed: ParsedRequest, model: ServedModel
    ) -> None:
        self.index, self.num_tokens = index, 0
        self.min_tokens = request.params.min_tokens
        self.structured = request.params.structured is not None
        self._request, self._asked, self._model = request, parsed, model
        self._prompt: list[PromptRows] = []
        self._text = TextStream(model.table)  # before the part that comes next
        self._begun = False
        self._calls = CallReader() if parsed.calls else None

    @property
    def large(self) -> bool:
        """Whether the next call of `json` has the logprobs of a whole prompt."""
        return bool(self._prompt) and not self._begun

    def add_prompt(self, rows: PromptRows) -> None:
        """Keep a part of the prompt's logprobs, which come before the first token."""
        self._prompt.append(rows)

    def json(
        self, parts: Sequence[DeliveryPart], finish: str | None, stop_reason: int | str | None
    ) -> dict[str, Any]:
        """The choice with what these parts add; the first call also has what is about the prompt.

        Args:
          parts: the next records.
          finish: why it ended, in the API's word; None in a chunk that is not the last.
          stop_reason: the string or the token id that ended it, where one did.
        """
        records = [part.record for part in parts if part.record.num_tokens]
        if self._asked.score_only:
            parts, records = [], []
        text = "".join(part.text for part in parts)
        first, self._begun = not self._begun, True
        self.num_tokens += sum(record.num_tokens for record in records)
        choice: dict[str, Any] = {"index": self.index}
        choice |= (
            self._chat(text, records, first, finish)
            if self._asked.chat
            else self._plain(text, records, first)
        )
        if finish == "stop" and self._calls is not None and self._calls.complete:
            finish = "tool_calls"
        choice |= {"finish_reason": finish, "stop_reason": stop_reason}
        if self._asked.body.logprobs_columns:
            columns = base64_columns(records, self._request.params)
            choice |= {"logprobs": None, "columns": columns}
        return choice | self._extras(records, first)

    def _chat(
        self, text: str, records: Sequence[Record], first: bool, finish: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._asked.logprobs is not None and not self._asked.body.logprobs_columns:
            logprobs = openai.chat_logprobs(records, self._model.table)
        key = "delta" if self._asked.body.stream else "message"
        message: dict[str, Any] = {"content": text}
        if self._calls is not None:
            content, call = self._calls.push(text, over=finish is not None)
            message = {"content": content or None if call else content}
            if call is not None:
                message["tool_calls"] = [call]
                if not self._asked.body.stream:
                    del call["index"]
        if first:
            message = {"role": "assistant"} | message
        if not self._asked.body.stream:
            message["refusal"] = None
        return {key: message, "logprobs": logprobs or _empty(self._asked, _CHAT)}

    def _plain(self, text: str, records: Sequence[Record], first: bool) -> dict[str, Any]:
        parsed, table = self._asked, self._model.table
        has_logprobs = parsed.logprobs is not None and not parsed.body.logprobs_columns
        logprobs = None
        if parsed.echo and first:
            ids = self._request.prompt_token_ids
            text = table.decode(ids) + text
            if has_logprobs:
                assert parsed.logprobs is not None
                rows = openai.joined_prompt(self._prompt, parsed.logprobs)
                logprobs = openai.echoed_logprobs(ids[0], rows, table, stream=self._text)
            else:
                self._text.push(ids)
            self._text.finish()  # even where the prompt ends inside a character
        if has_logprobs and records:
            more = openai.completion_logprobs(records, table, stream=self._text)
            assert more is not None
            logprobs = more if logprobs is None else {
                name: [*logprobs[name], *more[name]] for name in more
            }  # fmt: skip
        return {"text": text, "logprobs": logprobs or _empty(parsed, _COMPLETION)}

    def _extras(self, records: Sequence[Record], first: bool) -> dict[str, Any]:
        parsed, request, table = self._asked, self._request, self._model.table
        extras: dict[str, Any] = {}
        if parsed.prompt_logprobs and first:
            k = request.params.prompt_logprobs
            assert k is not None
            rows = openai.joined_prompt(self._prompt, k)
            extras["prompt_logprobs"] = vllm_prompt_logprobs(rows, table)
            if rows.start > 1:
                extras["prompt_logprobs_start"] = rows.start
            if request.params.prompt_extra_token_ids is not None:
                extras["prompt_chosen_logprobs"] = openai.prompt_chosen_logprobs(rows)
        if parsed.body.return_token_ids:
            if first:
                extras["prompt_token_ids"] = list(request.prompt_token_ids)
            extras["token_ids"] = [
                token_id for record in records for token_id in record.token_ids.tolist()
            ]
        if parsed.speculation:
            extras["speculation"] = speculation(records, table)
            if not parsed.body.stream:
                extras["speculation"] |= request_extension(request, records, table)
        return extras


def stop_reason(record: Record, eos: Sequence[int]) -> int | None:
    """The token that ended a request, unless it is one that ends every text."""
    token_id = record.stop_token_id
    return None if token_id in eos else token_id


def finish_word(record: Record) -> str | None:
    """The API's word for why a request ended; None where that is an error, or it goes on."""
    reason = record.finish_reason
    if reason in (FinishReason.STOP_TOKEN, FinishReason.STOP_SEQUENCE, FinishReason.LENGTH):
        return openai.finish_reason(reason)
    return None


_COMPLETION: dict[str, Any] = {
    "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
}  # fmt: skip
_CHAT: dict[str, Any] = {"content": [], "refusal": None}


def _empty(parsed: ParsedRequest, format: dict[str, Any]) -> dict[str, Any] | None:
    """The logprobs of no token: None where none were asked for."""
    return format if parsed.logprobs is not None and not parsed.body.logprobs_columns else None
