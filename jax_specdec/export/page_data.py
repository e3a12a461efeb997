"""What a page's script reads: columns of all responses in one compressed block of bytes."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.shown import Shown
from jax_specdec.export.token_columns import Ragged

_TYPES = {"uint8": "u1", "int32": "i4", "uint32": "u4", "float32": "f4"}
_LEVEL = 1  # of compression: another one takes several times as long for a tenth of the bytes


def packed(
    files: Sequence[Sequence[Shown]], names: Sequence[str], strings: Sequence[str]
) -> tuple[str, str]:
    """The data of a page in two blocks, each as base64 of a zlib stream, harmless in any markup.

    The first has what the page draws, the second what it shows of a single token. A block has the
    length of its head (uint32), the head, which is JSON, and the columns that the head lists, each
    at a multiple of four bytes, little-endian. Columns cover the responses of all files, one after
    the other. Columns of offsets have a value more than what they count: `row_start` tokens by
    response, `step_start` steps by response, `top_start` the top K by token, and `draft_start`
    drafts by step.
    """
    shown = [one for responses in files for one in responses]
    head = {
        "strings": strings,
        "requests": [
            {
                "id": one.id,
                "model": one.model,
                "prompt": one.prompt,
                "finish": one.finish_reason,
                "temperature": one.temperature,
                "mode": one.mode,
                "promptRows": one.num_prompt,
            }
            for one in shown
        ],
        "files": [
            {"name": name, "count": len(responses)}
            for name, responses in zip(names, files, strict=True)
        ],
    }
    return _block(head, _drawn(shown)), _block({}, _details(shown))


def _block(head: Mapping[str, Any], columns: Mapping[str, NDArray[np.generic]]) -> str:
    listed = [[name, _TYPES[values.dtype.name], len(values)] for name, values in columns.items()]
    text = json.dumps({**head, "columns": listed}, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    compressor = zlib.compressobj(_LEVEL)
    parts = [compressor.compress(len(text).to_bytes(4, "little") + text)]
    for values in columns.values():
        raw = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
        parts.append(compressor.compress(raw + bytes(-len(raw) % 4)))
    parts.append(compressor.flush())
    return base64.b64encode(b"".join(parts)).decode()


def _drawn(shown: Sequence[Shown]) -> dict[str, NDArray[np.generic]]:
    steps = np.concatenate([one.steps for one in shown])
    return {
        "row_start": _starts([len(one.tokens) for one in shown]),
        "token": np.concatenate([one.tokens for one in shown]),
        "logprob": np.concatenate([one.logprobs for one in shown]),
        "rank": np.concatenate([one.ranks for one in shown]),
        "kind": np.concatenate([one.kinds for one in shown]),
        "step_start": _starts([len(one.steps) for one in shown]),
        "step": np.ascontiguousarray(steps[:, 0]),
        "step_tokens": np.ascontiguousarray(steps[:, 1]),
        "step_drafts": np.ascontiguousarray(steps[:, 2]),
        "step_accepted": np.ascontiguousarray(steps[:, 3]),
    }


def _details(shown: Sequence[Shown]) -> dict[str, NDArray[np.generic]]:
    return {
        "id": np.concatenate([one.ids for one in shown]),
        **_lists("top", [one.top for one in shown]),
        **_lists("draft", [one.drafts for one in shown]),
    }


def _starts(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)


def _lists(name: str, lists: Sequence[Ragged]) -> dict[str, NDArray[np.generic]]:
    counts = np.concatenate([np.diff(one.offsets) for one in lists])
    return {
        f"{name}_start": _starts(counts),
        f"{name}_token": np.concatenate([one.ids for one in lists]),
        f"{name}_logprob": np.concatenate([one.logprobs for one in lists]),
    }
