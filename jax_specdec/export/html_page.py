"""A page that shows every token's logprob: OpenAI-style responses to one HTML file.

The page loads nothing, and what a token says is data in it: never markup, never a script. The data
is columns in compressed blocks (`page_data`), and the script draws only what is seen of it.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export import response_files
from jax_specdec.export.response_files import ViewError
from jax_specdec.export.shown import Shown, Strings
from jax_specdec.export.token_columns import Ragged

__all__ = ["View", "ViewError", "page", "read"]

# The script's parts, in the order in which they run.
SCRIPTS = ("data", "numbers", "summary", "text", "panel", "find", "main")


@dataclass(frozen=True)
class View:
    """The responses of one file, or of two to compare.

    Attributes:
      strings: the tokens' strings, numbered; of all files.
      files: the responses of each file.
      names: what the files are called.
    """

    strings: Strings = field(default_factory=Strings)
    files: list[list[Shown]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, lines: Iterable[str], name: str = "") -> None:
        """Read another file.

        Raises:
          ViewError: it holds something other than responses.
        """
        self.files.append(response_files.read_responses(lines, self.strings))
        self.names.append(name)

    @property
    def num_responses(self) -> int:
        return sum(map(len, self.files))

    @property
    def num_tokens(self) -> int:
        """Tokens emitted, without those of prompts."""
        return sum(
            len(response.tokens) - response.num_prompt for file in self.files for response in file
        )


def read(lines: Iterable[str]) -> View:
    """The responses of one file: one a line, a JSON array, or a batch's output.

    Raises:
      ViewError: it holds something other than responses.
    """
    view = View()
    view.add(lines)
    return view


def page(view: View, title: str) -> str:
    """A whole HTML document that refers to nothing outside of itself.

    With two files, responses stand side by side: those of one id, if all ids are told apart and
    some are in both files, otherwise the first beside the first and so on.
    """
    parts = Path(__file__).with_name("page")
    style = (parts / "page.css").read_text(encoding="utf-8")
    scripts = [(parts / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n' + "\n".join(scripts)
    # The browser runs this script and no other, such as one smuggled in by a token.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # In one pass, as a title may hold the names of placeholders.
    text = (parts / "page.html").read_text(encoding="utf-8")
    drawn, details = page_data(view.files, view.names, list(view.strings))
    values = {
        "policy": _escaped(policy),
        "title": _escaped(title),
        "style": style,
        "script": script,
        "drawn": drawn,
        "details": details,
    }
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], text)


def _hash(text: str) -> str:
    """The name of an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    for character, name in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(character, f"&{name};")
    return text


_TYPES = {"uint8": "u1", "int32": "i4", "uint32": "u4", "float32": "f4"}
# A response's data, by the names of the page's script and of `Shown`; and the columns of steps.
_OF_RESPONSE = {
    "id": "id", "model": "model", "prompt": "prompt", "finish": "finish_reason",
    "temperature": "temperature", "mode": "mode", "promptRows": "num_prompt",
}  # fmt: skip
_OF_STEP = ("step", "step_tokens", "step_drafts", "step_accepted")
_LEVEL = 1  # of compression: another one takes several times as long for a tenth of the bytes


def page_data(
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
    shown = [response for responses in files for response in responses]
    head = {
        "strings": strings,
        "requests": [
            {name: getattr(response, field) for name, field in _OF_RESPONSE.items()}
            for response in shown
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
    names = "token", "logprob", "rank", "kind"
    steps = np.concatenate([response.steps for response in shown])
    columns = map(np.ascontiguousarray, steps.T)
    return {
        "row_start": _starts([len(response.tokens) for response in shown]),
        **{
            name: np.concatenate([getattr(response, f"{name}s") for response in shown])
            for name in names
        },
        "step_start": _starts([len(response.steps) for response in shown]),
        **dict(zip(_OF_STEP, columns, strict=True)),
    }


def _details(shown: Sequence[Shown]) -> dict[str, NDArray[np.generic]]:
    return {
        "id": np.concatenate([response.ids for response in shown]),
        **_lists("top", [response.top for response in shown]),
        **_lists("draft", [response.drafts for response in shown]),
    }


def _starts(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)


def _lists(name: str, lists: Sequence[Ragged]) -> dict[str, NDArray[np.generic]]:
    counts = np.concatenate([np.diff(token_lists.offsets) for token_lists in lists])
    return {
        f"{name}_start": _starts(counts),
        f"{name}_token": np.concatenate([token_lists.ids for token_lists in lists]),
        f"{name}_logprob": np.concatenate([token_lists.logprobs for token_lists in lists]),
    }
