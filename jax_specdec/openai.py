"""Records as OpenAI-style dictionaries: built only when asked for, ready for `json.dumps`. No jax.

Formats: the `logprobs` objects of the completions and chat completions APIs
(https://platform.openai.com/docs/api-reference). JSON has no -inf and no NaN: they are written as
-9999.0 and null. Ids of -1 (fewer than K finite logits) are left out.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from jax_specdec.records import FinishReason, Record

NEGATIVE_INFINITY = -9999.0  # what OpenAI's API uses for "very unlikely"

# A token's display text and its true bytes. The bytes of one token need not be valid UTF-8; the
# text of such a token is the caller's choice and must only be a string.
TokenText = Callable[[int], tuple[str, bytes]]


def completion_logprobs(
    records: Iterable[Record], token_text: TokenText, *, text_offset: int = 0
) -> dict[str, Any] | None:
    """The completions format of one request's records, in order; None if no logprobs were asked.

    `top_logprobs` has one dictionary a token, by token text; where two ids have the same text,
    the more likely one stays. `text_offset` is where the first token begins in the whole text.
    """
    result: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    asked = False
    for record in records:
        rows, topk_ids = record.logprobs, record.topk_ids
        if rows is None or topk_ids is None:
            continue
        asked = True
        for token, row, ids in zip(
            record.token_ids.tolist(), rows.tolist(), topk_ids.tolist(), strict=True
        ):
            text, _ = token_text(token)
            result["tokens"].append(text)
            result["token_logprobs"].append(json_number(row[0]))
            top: dict[str, float | None] = {}
            for id, logprob in zip(ids, row[1:], strict=True):
                if id >= 0:
                    top.setdefault(token_text(id)[0], json_number(logprob))
            result["top_logprobs"].append(top)
            result["text_offset"].append(text_offset)
            text_offset += len(text)
    return result if asked else None


def chat_logprobs(records: Iterable[Record], token_text: TokenText) -> dict[str, Any] | None:
    """The chat completions format of one request's records; None if no logprobs were asked."""
    content: list[dict[str, Any]] = []
    asked = False
    for record in records:
        rows, topk_ids = record.logprobs, record.topk_ids
        if rows is None or topk_ids is None:
            continue
        asked = True
        for token, row, ids in zip(
            record.token_ids.tolist(), rows.tolist(), topk_ids.tolist(), strict=True
        ):
            top = [
                _chat_token(id, logprob, token_text)
                for id, logprob in zip(ids, row[1:], strict=True)
                if id >= 0
            ]
            content.append({**_chat_token(token, row[0], token_text), "top_logprobs": top})
    return {"content": content, "refusal": None} if asked else None


def finish_reason(reason: FinishReason | None) -> str | None:
    """The API's word: "stop" or "length"; what it has no word for keeps its own name."""
    if reason is None:
        return None
    if reason in (FinishReason.STOP_TOKEN, FinishReason.STOP_SEQUENCE):
        return "stop"
    return reason.name.lower()


def json_number(logprob: float) -> float | None:
    """A logprob as JSON can carry it: -9999.0 for -inf, None for NaN."""
    if math.isnan(logprob):
        return None
    return NEGATIVE_INFINITY if logprob == -math.inf else logprob


def _chat_token(id: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    text, raw = token_text(id)
    return {"token": text, "logprob": json_number(logprob), "bytes": list(raw)}
