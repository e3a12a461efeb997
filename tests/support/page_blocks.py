"""The data in a page of `jax-specdec view`, read as the page's script reads it."""

import base64
import json
import re
import zlib

import numpy as np


def blocks(document):
    """What the page draws and its details: each the head of a block, its columns by name."""
    return tuple(
        block(re.search(rf'<script id="{name}"[^>]*>([\w+/=]*)</script>', document)[1])
        for name in ("drawn", "details")
    )


def block(text):
    raw = zlib.decompress(base64.b64decode(text))
    size = int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4 : 4 + size])
    at = 4 + size
    for name, kind, length in head.pop("columns"):
        head[name] = np.frombuffer(raw, "<" + kind, length, at)
        at += -(-head[name].nbytes // 4) * 4
    assert at == len(raw)
    return head
