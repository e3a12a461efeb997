r"""A file of prompts to requests.

A text file has one prompt a line, in which `\n`, `\t` and `\\` stand for the characters that they
name. A file whose name ends in .jsonl has one object a line: "prompt", "messages" or
"prompt_token_ids", "stop" (strings that end the text), and the fields of `SamplingParams` in which
the line differs from the others.
The name "-" stands for standard input, which is a text file.
"""

import dataclasses
import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax_specdec.beside.ipc  # noqa: F401
from ipc.wire import LogprobsMode
from jax_specdec.cli.argument_types import closest
from jax_specdec.requests import Request, RequestError, SamplingParams, biases_of_json
from jax_specdec.serve.model import Encoder

STANDARD_INPUT = Path("-")
_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
# OpenAI's fields that have another name here.
_OTHERS = {
    "max_completion_tokens": "write max_tokens",
    "top_logprobs": 'write "logprobs": true beside it, or the number as "logprobs"',
    "echo": "write prompt_logprobs, the number of most likely tokens of each of the prompt's",
    "response_format": 'write "structured": ["json_schema", a JSON schema as a string]',
    "n": "write as many lines, each with a seed of its own",
}
_MODES = {mode.name.lower(): mode for mode in LogprobsMode}


@dataclass(frozen=True)
class Prompt:
    """One line: its request, whether the response has the chat format, and its stop strings."""

    request: Request
    chat: bool
    stops: tuple[str, ...] = ()

    def digest(self, *settings: str) -> str:
        """A hash of ids, parameters and `settings`, which recognizes a record of this request."""
        params = dataclasses.asdict(self.request.params)
        hashed = [self.request.prompt_token_ids, params, settings, *self.stops]
        text = json.dumps(hashed, default=bytes.hex)  # of ids that are packed
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_prompts(
    path: Path, encoder: Encoder, defaults: SamplingParams, stops: Sequence[str] = ()
) -> list[Prompt]:
    """The prompts of a file, in order; a line without an "id" is named by its number.

    A line without a seed of its own gets `defaults.seed` plus its number, so that equal prompts
    are sampled differently.

    Raises:
      OSError: the file cannot be read.
      RequestError: as `prompt_lines`, or a line is not a prompt; says which line and why.
    """
    is_jsonl, place = path.suffix == ".jsonl", _name(path)
    prompts: list[Prompt] = []
    names: dict[str, int] = {}
    for number, line in prompt_lines(path):
        try:
            fields = _json(line) if is_jsonl else {"prompt": unescape(line)}
            prompt = _prompt(fields, str(number), encoder, _seeded(defaults, number), stops)
        except ValueError as error:  # from JSON, from a value, or from the chat template
            raise RequestError(f"{place}, line {number}: {error}") from error
        if (before := names.setdefault(prompt.request.id, number)) != number:
            raise RequestError(
                f"{place}, line {number}: line {before} has the id {prompt.request.id!r} too; "
                "give every line its own"
            )
        prompts.append(prompt)
    return prompts


def given_prompts(
    texts: Sequence[str], encoder: Encoder, defaults: SamplingParams, stops: Sequence[str] = ()
) -> list[Prompt]:
    """Prompts whose texts are given, as they are, named by their numbers from 1.

    The text "-" stands for all of standard input, without the line end that it may end with.

    Raises:
      RequestError: standard input is not UTF-8 text, or a prompt is empty.
    """
    if texts.count("-") > 1:
        raise RequestError("standard input can be read once: give --prompt - once")
    prompts = []
    for number, text in enumerate(texts, 1):
        prompt_text = _text(STANDARD_INPUT).removesuffix("\n") if text == "-" else text
        seeded = _seeded(defaults, number)
        prompts.append(_prompt({"prompt": prompt_text}, str(number), encoder, seeded, stops))
    return prompts


def _seeded(defaults: SamplingParams, number: int) -> SamplingParams:
    return dataclasses.replace(defaults, seed=(defaults.seed + number) % 2**32)


def unescape(text: str) -> str:
    r"""The text with `\n`, `\t` and `\\` replaced; any other backslash stays."""
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match[0]], text)


def prompt_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a UTF-8 file that are not empty, with their numbers from 1.

    Only a line feed ends a line, as in JSONL: `splitlines` would also split on form feeds.

    Raises:
      OSError: the file cannot be read.
      RequestError: it is not UTF-8 text, or all its lines are empty.
    """
    numbered = enumerate(_text(path).split("\n"), 1)
    lines = [(number, line.removesuffix("\r")) for number, line in numbered if line.strip()]
    if not lines:
        raise RequestError(f"{_name(path)} holds no prompts: write one a line")
    return lines


def _text(path: Path) -> str:
    raw = sys.stdin.buffer.read() if path == STANDARD_INPUT else path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{_name(path)} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start}; write one prompt a line"
        ) from error


def _name(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


def _json(line: str) -> Any:
    """The value of a line of JSON, in which no escape names half a character."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{error.msg} (column {error.colno}): it must be a JSON object such as "
            '{"prompt": "Hi"}; a file with bare texts needs a name that does not end in .jsonl'
        ) from error
    except RecursionError as error:
        raise RequestError(f"the line is not read: {error}") from error
    try:
        json.dumps(fields, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RequestError(
            f"\\u{ord(half):04x} is half of a surrogate pair, and the other half is missing: "
            "write the character itself"
        ) from error
    return fields


def _prompt(
    fields: Any, name: str, encoder: Encoder, defaults: SamplingParams, stops: Sequence[str]
) -> Prompt:
    if not isinstance(fields, dict):
        raise RequestError(f'a {type(fields).__name__}, not an object such as {{"prompt": "Hi"}}')
    values = dict(fields)
    stops = _stops(values.pop("stop", stops))
    kinds = [kind for kind in _PROMPTS if kind in values]
    if not kinds:  # one that is misspelt is refused as an unknown field
        sampling_params({key: value for key, value in values.items() if key != "id"}, defaults)
    if len(kinds) != 1:
        raise RequestError(
            f"a line has one of {', '.join(_PROMPTS)}; this one has {kinds or 'none'}"
        )
    kind, value = kinds[0], values.pop(kinds[0])
    id = values.pop("id", name)
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise RequestError(f"id = {id!r} must be a string or an integer")
    if kind == "prompt":
        if not isinstance(value, str):
            raise RequestError(f"prompt = {value!r} must be of type str")
        ids = encoder.encode(value)
    elif kind == "messages":
        ids = encoder.encode_chat(_messages(value))
    else:
        ids = value
    params = sampling_params(values, defaults)
    request = Request(id=str(id), prompt_token_ids=ids, params=params)
    return Prompt(request, kind == "messages", stops)


def _stops(value: Any) -> tuple[str, ...]:
    """Stop strings: one, several, or none."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"stop = {value!r} must be a string or strings, none of them empty")
    return tuple(stops)


def sampling_params(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """`defaults` with the changes in the JSON object `fields`.

    "logprobs" may be a number (K), or true with "top_logprobs" as in OpenAI's chat format.

    Raises:
      RequestError: a field is not known, or a value is outside its range.
    """
    values = dict(fields)
    if isinstance(number := values.get("logprobs"), bool):
        values["logprobs"] = values.pop("top_logprobs", 0) if number else None
    types = {field.name: field.type for field in dataclasses.fields(SamplingParams)}
    for name, value in values.items():
        if name not in types:
            raise RequestError(f"{name!r} {_way_out(name, ['id', *_PROMPTS, 'stop', *types])}")
        if name == "logprobs_mode":
            if not isinstance(value, str) or value not in _MODES:
                raise RequestError(f"{name} = {value!r} must be one of {', '.join(_MODES)}")
            values[name] = _MODES[value]
        elif name == "logit_bias" and isinstance(value, dict):
            values[name] = biases_of_json(value)
        elif types[name] is float and type(value) is int:
            values[name] = float(value) if abs(value) < 1 << 64 else math.inf
    return dataclasses.replace(defaults, **values)


def _way_out(name: str, names: list[str]) -> str:
    """The field to write instead of one that is not known."""
    if name in _OTHERS:
        return f"is not known here; {_OTHERS[name]}"
    near = closest(name, names)
    return f"is not known{f'{near} Known' if near else '; known'} are {', '.join(names)}"


def _messages(value: Any) -> list[dict[str, Any]]:
    told = isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message for message in value
    )
    if not (value and told):
        raise RequestError("messages must be a list of objects with a role and a content")
    return list(value)
