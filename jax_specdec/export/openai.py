"""Records as OpenAI-style responses, ready for `json.dumps`.

The formats are those of the completions and the chat completions API
(https://platform.openai.com/docs/api-reference), whole and as the chunks of a stream. What they
have no place for stands beside them under "speculation" (`openai_extension.py`). JSON has neither
-inf nor NaN: they become -9999.0 and null. Ids of -1 (fewer than K finite logits) are left out.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jax_specdec.export.openai_extension import json_number, request_extension, speculation
from jax_specdec.records.batch import FinishReason, PromptRows
from jax_specdec.records.record import Record
from jax_specdec.requests import Request
from jax_specdec.text.detokenize import TextStream, TokenTable

DONE = b"data: [DONE]\n\n"  # ends a stream of server-sent events


def positions(
    rows: Record | PromptRows,
) -> Iterator[tuple[int, list[float | None], list[int]]]:
    """Yield each position's id, its logprobs as JSON values, and the ids of its top K."""
    logprobs, topk_ids = rows.logprobs, rows.topk_ids
    assert logprobs is not None
    assert topk_ids is not None
    for token_id, row, ids in zip(
        rows.token_ids.tolist(), logprobs.tolist(), topk_ids.tolist(), strict=True
    ):
        # One test for a whole row: logprobs are finite exactly where their sum is.
        values = row if math.isfinite(sum(row)) else [json_number(value) for value in row]
        if ids and ids[-1] < 0:  # the missing ones are the last
            ids = [token_id for token_id in ids if token_id >= 0]
        yield token_id, values, ids


def completion_logprobs(
    records: Iterable[Record], table: TokenTable, *, stream: TextStream | None = None
) -> dict[str, Any] | None:
    """The completions format's logprobs of one request; None if it asked for no logprobs.

    `top_logprobs` has one dictionary a token, by token text: the top K, then the emitted token
    unless it is among them. Of two ids with the same text, the more likely one stays.
    `text_offset` counts characters of the whole text; a token that begins inside a character has
    the offset of that character.

    Args:
      records: the request's, in order.
      table: the strings of the tokenizer.
      stream: the text before the records; it is moved on past them. None: there is none.
    """
    rows = _with_logprobs(records)
    if not rows:
        return None
    stream = stream or TextStream(table)
    offsets = [stream.push_with_offsets(part.token_ids.tolist())[1] for part in rows]
    return _completion_rows(rows, table) | {"text_offset": [at for part in offsets for at in part]}


def chat_logprobs(records: Iterable[Record], table: TokenTable) -> dict[str, Any] | None:
    """The chat completions format's logprobs of one request; None if it asked for no logprobs.

    The bytes of all tokens, one after the other, are those of the text. A special token is no part
    of the text, and its bytes are None. All entries of a token share one tuple of bytes.
    """
    rows = _with_logprobs(records)
    content = [entry for part in rows for entry in _chat_rows(part, table)]
    return {"content": content, "refusal": None} if rows else None


def echoed_logprobs(
    first_id: int, rows: PromptRows, table: TokenTable, *, stream: TextStream
) -> dict[str, Any]:
    """The completions format's logprobs of a prompt that is part of the text (`echo`).

    Args:
      first_id: the prompt's first token, which nothing predicts: its logprobs are None.
      rows: of the tokens behind it.
      table: the strings of the tokenizer.
      stream: an empty text; it is moved on past the prompt.
    """
    completion_rows = _completion_rows([rows], table)
    _, offsets = stream.push_with_offsets([first_id, *rows.token_ids.tolist()])
    return {
        "tokens": [table.completion_text[first_id], *completion_rows["tokens"]],
        "token_logprobs": [None, *completion_rows["token_logprobs"]],
        "top_logprobs": [None, *completion_rows["top_logprobs"]],
        "text_offset": offsets,
    }


def prompt_logprobs(rows: PromptRows, table: TokenTable) -> list[dict[str, Any] | None]:
    """The chat format's entries for a prompt, from `rows.start` on: an extension.

    Where `rows` begin with the second token, None stands before them for the first: nothing
    predicts it.
    """
    first = [None] if rows.start == 1 else []
    return [*first, *_chat_rows(rows, table)]


def prompt_chosen_logprobs(rows: PromptRows) -> list[list[float | None]]:
    """The logprobs of the ids that each row of a prompt names, as JSON has them."""
    return [[json_number(x) for x in row] for row in rows.chosen_logprobs.tolist()]


def joined_prompt(parts: Sequence[PromptRows], k: int) -> PromptRows:
    """All rows that came of a prompt, with K = `k` at most."""
    empty = np.empty(0, np.int32)
    token_ids = np.concatenate([empty, *(part.token_ids for part in parts)])
    return PromptRows(
        start=parts[0].start if parts else 1,
        token_ids=token_ids,
        logprobs=np.concatenate(
            [np.empty((0, k + 1), np.float32), *(part.logprobs[:, : k + 1] for part in parts)]
        ),
        chosen_logprobs=np.concatenate(
            [part.chosen_logprobs for part in parts] or [np.empty((0, 0), np.float32)]
        ),
        token_ranks=np.concatenate([empty, *(part.token_ranks for part in parts)]),
        topk_ids=np.concatenate(
            [np.empty((0, k), np.int32), *(part.topk_ids[:, :k] for part in parts)]
        ),
    )


def finish_reason(reason: FinishReason | None) -> str | None:
    """The API's word, "stop" or "length"; a reason without one keeps its own name."""
    if reason is None:
        return None
    if reason in (FinishReason.STOP_TOKEN, FinishReason.STOP_SEQUENCE, FinishReason.STOP_STRING):
        return "stop"
    return reason.name.lower()


def usage(read: int, written: int) -> dict[str, int]:
    """The numbers of tokens read and written, as the API names them."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def completion(
    request: Request,
    records: Sequence[Record],
    table: TokenTable,
    *,
    model: str,
    created: int,
    index: int = 0,
    prompt: PromptRows | None = None,
    text: str | None = None,
) -> dict[str, Any]:
    """A whole response of the completions API.

    Args:
      request: the request; its id becomes the response's.
      records: all records of the request, in order.
      table: the strings of the tokenizer.
      model: the model's name in the response.
      created: the time of the response, in seconds since 1970.
      index: the number of the choice.
      prompt: the prompt's logprobs, as `prompt_logprobs` takes them, for the extension.
      text: what the records say, where a stop string cuts it; None: all that they say.
    """
    text = _text(records, table) if text is None else text
    choice = {"index": index, "text": text, "logprobs": completion_logprobs(records, table)}
    header = header_of(request.id, "text_completion", model, created)
    return _response_of(header, choice, request, records, table, prompt)


def chat_completion(
    request: Request,
    records: Sequence[Record],
    table: TokenTable,
    *,
    model: str,
    created: int,
    index: int = 0,
    prompt: PromptRows | None = None,
    text: str | None = None,
) -> dict[str, Any]:
    """A whole response of the chat completions API; the arguments are those of `completion`."""
    text = _text(records, table) if text is None else text
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": index, "message": message, "logprobs": chat_logprobs(records, table)}
    header = header_of(request.id, "chat.completion", model, created)
    return _response_of(header, choice, request, records, table, prompt)


def server_sent_event(chunk: dict[str, Any]) -> bytes:
    """A chunk as a line of an event stream; `DONE` follows the last chunk."""
    return b"data: " + json.dumps(chunk, allow_nan=False).encode() + b"\n\n"


def header_of(id: str, kind: str, model: str, created: int) -> dict[str, Any]:
    """The fields with which every response and every chunk begins."""
    return {"id": id, "object": kind, "created": created, "model": model}


def _text(records: Sequence[Record], table: TokenTable) -> str:
    return table.decode([id for record in records for id in record.token_ids.tolist()])


def _response_of(
    header: dict[str, Any],
    choice: dict[str, Any],
    request: Request,
    records: Sequence[Record],
    table: TokenTable,
    prompt: PromptRows | None,
) -> dict[str, Any]:
    """A response of one choice, with its reason, its usage and the extension."""
    extension = request_extension(request, records, table) | speculation(records, table)
    if prompt is not None:
        extension["prompt_logprobs"] = prompt_logprobs(prompt, table)
        if prompt.start > 1:
            extension["prompt_logprobs_start"] = prompt.start
        if request.params.prompt_extra_token_ids is not None:
            extension["prompt_chosen_logprobs"] = prompt_chosen_logprobs(prompt)
    reason = finish_reason(records[-1].finish_reason) if records else None
    written = sum(record.num_tokens for record in records)
    return {
        **header,
        "choices": [{**choice, "finish_reason": reason}],
        "usage": usage(len(request.packed_prompt) // 4, written),
        "speculation": extension,
    }


def _with_logprobs(records: Iterable[Record]) -> list[Record]:
    """The records that carry logprobs."""
    return [record for record in records if record.request.params.logprobs is not None]


def _completion_rows(rows: Iterable[Record | PromptRows], table: TokenTable) -> dict[str, Any]:
    text = table.completion_text
    tokens, logprobs, tops = [], [], []
    for token_id, (logprob, *values), ids in itertools.chain.from_iterable(map(positions, rows)):
        tokens.append(text[token_id])
        logprobs.append(logprob)
        top: dict[str, float | None] = {}
        for candidate, value in zip(ids, values, strict=False):  # without the missing
            top.setdefault(text[candidate], value)
        if logprob is not None:
            top.setdefault(text[token_id], logprob)
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops}


def _chat_rows(rows: Record | PromptRows, table: TokenTable) -> list[dict[str, Any]]:
    entries = []
    for token_id, values, ids in positions(rows):
        text, raw = table.chat[token_id]
        token_entries = map(table.chat.__getitem__, ids)
        top = [
            {"token": text, "logprob": value, "bytes": raw}
            for (text, raw), value in zip(token_entries, values[1:], strict=False)
        ]
        entries.append({"token": text, "logprob": values[0], "bytes": raw, "top_logprobs": top})
    return entries
