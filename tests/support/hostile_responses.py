"""Responses that a page must show without obeying them."""

import json

from jax_specdec.export.openai import completion
from tests.support.openai_records import MADE, TABLE

HOSTILE = [
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "<img src=x onerror=alert(1)>",
    "{{script}}", "</script x", "&lt;b&gt;", "\u2028\u2029",
    '"\'`', "\x00\x1b[31m", "</style>", "\ud800",
]  # fmt: skip


def line(records, build=completion):
    return json.dumps(build(records[0].request, records, TABLE, **MADE))


def response(name, tokens, logprobs, finish_reason="stop", **more):
    """A response of a server without the extension."""
    found = {"tokens": tokens, "token_logprobs": logprobs}
    choice = {"text": "".join(tokens), "finish_reason": finish_reason, "logprobs": found}
    return {"id": name, "choices": [choice], **more}


def hostile_response():
    first, count = HOSTILE[0], len(HOSTILE)
    said = {"model": first, "speculation": {"prompt": first, "logprobs_mode": first}}
    found = response(first, HOSTILE, [-0.5] * count, HOSTILE[3], **said)
    top = [dict.fromkeys(HOSTILE, -1.0)] * count
    found["choices"][0]["logprobs"] |= {"top_logprobs": top, "text_offset": [0] * count}
    return found
