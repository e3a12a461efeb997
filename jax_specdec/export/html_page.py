"""A page that shows every token's logprob: lines of OpenAI-style JSON to one HTML file. No jax.

It reads whole responses of the completions or the chat completions API, one a line. What
speculation did comes from the extension beside them (`openai_extension.py`), which a response may
lack. The page loads nothing, and what a token says is data in it: never markup, never a script.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_specdec.wording import counted

_KINDS = ("accepted", "recovered", "bonus", "plain")  # in the order of the page's script

Top = list[tuple[str, float | None]]
Index = Callable[[str], int]  # a string's place in the page's list


class ViewError(ValueError):
    """A line is not a response; says which line and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """One step of a request; `drafts` has (string, logprob) of each draft, where they were sent."""

    step: int
    num_tokens: int
    num_drafts: int
    num_accepted: int
    drafts: Sequence[tuple[str, float | None]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One response of n tokens; what it does not say is None.

    Attributes:
      tokens: [n] strings.
      logprobs: [n], None in an invalid row.
      top: [n] each token's top K, most likely first.
      ids, ranks, kinds: [n] from the extension.
      steps: from the extension; their tokens add up to n.
    """

    id: str
    model: str
    prompt: str
    finish_reason: str | None
    temperature: float | None
    mode: str | None
    tokens: Sequence[str]
    logprobs: Sequence[float | None] | None
    top: Sequence[Top] | None
    ids: Sequence[int] | None
    ranks: Sequence[int] | None
    kinds: Sequence[str] | None
    steps: Sequence[ShownStep]


def read(lines: Iterable[str]) -> list[Shown]:
    """The responses of a JSONL file; empty lines are skipped.

    Raises:
      ViewError: a line is not JSON, or not a response; or there is no line.
    """
    shown = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            shown += _responses(json.loads(line))
        except json.JSONDecodeError as error:
            raise ViewError(f"line {number} is not JSON: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ViewError(
                f"line {number} is not a completion or chat completion: {what}; write one with "
                "jax-specdec demo --json FILE"
            ) from error
    if not shown:
        raise ViewError("there is no response in it: write one JSON object a line")
    return shown


def page(responses: Sequence[Shown], title: str) -> str:
    """A whole HTML document that refers to nothing outside of itself."""
    parts = Path(__file__).with_name("page")
    style = (parts / "page.css").read_text(encoding="utf-8")
    script = (parts / "page.js").read_text(encoding="utf-8")
    # The browser runs this script and no other, such as one smuggled in by a token.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # In one pass, as the data may hold the names of placeholders.
    text = (parts / "page.html").read_text(encoding="utf-8")
    values = {
        "policy": _escaped(policy),
        "title": _escaped(title),
        "style": style,
        "script": script,
        "data": script_data(page_data(responses)),
    }
    head, *rest = text.split("{{")
    filled = [head]
    for piece in rest:
        name, _, tail = piece.partition("}}")
        filled += [values[name], tail]
    return "".join(filled)


def page_data(responses: Sequence[Shown]) -> dict[str, Any]:
    """What the page's script reads: every string once, in a list, and columns of their indices."""
    strings: dict[str, int] = {}

    def index(text: str) -> int:
        return strings.setdefault(text, len(strings))

    requests = [_columns(one, index) for one in responses]
    return {"strings": list(strings), "requests": requests}


def script_data(value: Any) -> str:
    """JSON that is harmless in a `<script>` element: it has no `<`, which could end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _columns(one: Shown, index: Index) -> dict[str, Any]:
    top = None if one.top is None else [_flat(row, index) for row in one.top]
    return {
        "id": one.id,
        "model": one.model,
        "prompt": one.prompt,
        "finish": one.finish_reason,
        "temperature": one.temperature,
        "mode": one.mode,
        "tokens": [index(text) for text in one.tokens],
        "logprobs": one.logprobs,
        "top": top,
        "ids": one.ids,
        "ranks": one.ranks,
        "kinds": one.kinds and [_KINDS.index(kind) for kind in one.kinds],
        "steps": [
            [
                step.step,
                step.num_tokens,
                step.num_drafts,
                step.num_accepted,
                _flat(step.drafts, index),
            ]
            for step in one.steps
        ],
    }


def _flat(candidates: Iterable[tuple[str, float | None]], index: Index) -> list[float | None]:
    return [part for text, logprob in candidates for part in (index(text), logprob)]


def _responses(value: Any) -> list[Shown]:
    """What is shown of a response: one `Shown` for each choice."""
    choices = value["choices"]
    return [
        _response(value, choice, f"{value['id']}" + (f" #{n}" if len(choices) > 1 else ""))
        for n, choice in enumerate(choices)
    ]


def _response(value: Any, choice: Any, name: str) -> Shown:
    extension = value.get("speculation") or {}
    tokens, logprobs, top = _tokens(choice, extension)
    columns = _extension_columns(extension, len(tokens))
    temperature, reason = extension.get("temperature"), choice.get("finish_reason")
    return Shown(
        id=name,
        model=str(value.get("model") or ""),
        prompt=str(extension.get("prompt") or ""),
        finish_reason=None if reason is None else str(reason),
        temperature=None if temperature is None else float(temperature),
        mode=extension.get("logprobs_mode"),
        tokens=tokens,
        logprobs=logprobs if tokens or logprobs else None,
        top=top,
        ids=_integers(columns["token_ids"]),
        ranks=_integers(columns["token_ranks"]),
        kinds=columns["token_kinds"],
        steps=_steps(extension, len(tokens)),
    )


def _extension_columns(extension: Any, num_tokens: int) -> dict[str, Any]:
    """The extension's columns, which must have a value for each token where they are there."""
    columns = {key: extension.get(key) for key in ("token_ids", "token_ranks", "token_kinds")}
    for key, column in columns.items():
        if column is not None:
            _check_length(key, column, num_tokens)
    for kind in columns["token_kinds"] or ():
        if kind not in _KINDS:
            raise ValueError(f"token_kinds has {kind!r}; known are {', '.join(_KINDS)}")
    return columns


def _steps(extension: Any, num_tokens: int) -> list[ShownStep]:
    steps = [_step(step) for step in extension.get("by_step") or ()]
    if steps and sum(step.num_tokens for step in steps) != num_tokens:
        raise ValueError(f"by_step does not add up to {counted(num_tokens, 'token')}")
    return steps


def _tokens(
    choice: Any, extension: Any
) -> tuple[list[str], list[float | None] | None, list[Top] | None]:
    """The tokens' strings, logprobs and top K; a text without tokens counts as one token."""
    logprobs = choice.get("logprobs")
    if logprobs is None:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        known = extension.get("tokens", [text] if text else [])
        return [str(token) for token in known], None, None
    return _chat_tokens(logprobs) if "content" in logprobs else _completion_tokens(logprobs)


def _chat_tokens(logprobs: Any) -> tuple[list[str], list[float | None], list[Top]]:
    content = logprobs["content"] or []
    return (
        [str(entry["token"]) for entry in content],
        [_number(entry["logprob"]) for entry in content],
        [[_candidate(c["token"], c["logprob"]) for c in e["top_logprobs"]] for e in content],
    )


def _completion_tokens(logprobs: Any) -> tuple[list[str], list[float | None], list[Top]]:
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    tops = logprobs.get("top_logprobs") or [{} for _ in tokens]
    _check_length("token_logprobs", values, len(tokens))
    _check_length("top_logprobs", tops, len(tokens))
    return (
        [str(token) for token in tokens],
        [_number(value) for value in values],
        [[_candidate(text, value) for text, value in (top or {}).items()] for top in tops],
    )


def _check_length(name: str, values: Any, num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise ValueError(f"{name} has length {len(values)} for {counted(num_tokens, 'token')}")


def _candidate(text: Any, logprob: Any) -> tuple[str, float | None]:
    return str(text), _number(logprob)


def _step(value: Any) -> ShownStep:
    texts, logprobs = value.get("draft_tokens") or [], value.get("draft_logprobs")
    logprobs = [None] * len(texts) if logprobs is None else logprobs
    return ShownStep(
        step=int(value["step"]),
        num_tokens=int(value["num_tokens"]),
        num_drafts=int(value["num_drafts"]),
        num_accepted=int(value["num_accepted"]),
        drafts=[_candidate(t, p) for t, p in zip(texts, logprobs, strict=True)],
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _integers(values: Any) -> list[int] | None:
    return None if values is None else [int(value) for value in values]


def _hash(text: str) -> str:
    """The name of an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    for character, name in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(character, f"&{name};")
    return text
