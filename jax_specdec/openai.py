"""Records as OpenAI-style dictionaries: built only when asked for, ready for `json.dumps`. No jax.

Formats: the `logprobs` objects of the completions and chat completions APIs
(https://platform.openai.com/docs/api-reference). JSON has no -inf and no NaN: they are written as
-9999.0 and null. Ids of -1 (fewer than K finite logits) are left out.
"""

import math
from collections.abc import Callable, Iterable, Iterator
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
    asked = _asked(records)
    for token, logprob, candidates in _tokens(asked):
        text, _ = token_text(token)
        result["tokens"].append(text)
        result["token_logprobs"].append(json_number(logprob))
        top: dict[str, float | None] = {}
        for id, candidate in candidates:
            top.setdefault(token_text(id)[0], json_number(candidate))
        result["top_logprobs"].append(top)
        result["text_offset"].append(text_offset)
        text_offset += len(text)
    return result if asked else None


def chat_logprobs(records: Iterable[Record], token_text: TokenText) -> dict[str, Any] | None:
    """The chat completions format of one request's records; None if no logprobs were asked."""
    asked = _asked(records)
    content = [
        {
            **_chat_token(token, logprob, token_text),
            "top_logprobs": [_chat_token(id, value, token_text) for id, value in candidates],
        }
        for token, logprob, candidates in _tokens(asked)
    ]
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


def _asked(records: Iterable[Record]) -> list[Record]:
    """Those that carry logprobs."""
    return [record for record in records if record.request.params.logprobs is not None]


def _tokens(records: Iterable[Record]) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Each token's id and logprob, and the ids and logprobs of its top K that exist."""
    for record in records:
        rows, topk_ids = record.logprobs, record.topk_ids
        assert rows is not None
        assert topk_ids is not None
        for token, row, ids in zip(
            record.token_ids.tolist(), rows.tolist(), topk_ids.tolist(), strict=True
        ):
            top = zip(ids, row[1:], strict=True)
            yield token, row[0], [(id, logprob) for id, logprob in top if id >= 0]


def _chat_token(id: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    text, raw = token_text(id)
    return {"token": text, "logprob": json_number(logprob), "bytes": list(raw)}
