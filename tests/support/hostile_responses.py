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


def hostile_response():
    return {
        "id": HOSTILE[0],
        "choices": [
            {
                "text": "".join(HOSTILE),
                "finish_reason": HOSTILE[3],
                "logprobs": {
                    "tokens": HOSTILE,
                    "token_logprobs": [-0.5] * len(HOSTILE),
                    "top_logprobs": [dict.fromkeys(HOSTILE, -1.0)] * len(HOSTILE),
                    "text_offset": [0] * len(HOSTILE),
                },
            }
        ],
        "model": HOSTILE[0],
        "speculation": {"prompt": HOSTILE[0], "logprobs_mode": HOSTILE[0]},
    }
