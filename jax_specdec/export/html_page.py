"""A page that shows every token's logprob: lines of OpenAI-style JSON to one HTML file. No jax.

Reads completions and chat completions, whole responses, one a line; what speculation did comes from
the extension beside them (`speculation.py`), and a response without it is shown without it. The
page loads nothing, and whatever a token says is data in it: never markup, never a script.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_specdec.wording import counted

NEGATIVE_INFINITY = -9999.0  # in the JSON; the page shows it as such
KINDS = ("accepted", "recovered", "bonus", "plain")

Top = list[tuple[str, float | None]]
Index = Callable[[str], int]  # of a string in the page's list


class ViewError(ValueError):
    """A line that is no response; says which line and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a request; `drafts` has the drafts' strings and logprobs where they were sent."""

    step: int
    num_tokens: int
    num_drafts: int
    num_accepted: int
    drafts: Sequence[tuple[str, float | None]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One response, of n tokens; what it did not say is None.

    Attributes:
      tokens: [n] strings.
      logprobs: [n], None in an invalid row.
      top: [n] the top K of each token, most likely first.
      ids, ranks, kinds: [n] of the extension.
      steps: of the extension; their tokens sum to n.
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
    steps: Sequence[Step]


def read(lines: Iterable[str]) -> list[Shown]:
    """The responses of a JSONL file; a line that is empty is passed over.

    Raises:
      ViewError: a line that is not JSON, or no response.
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
                f"line {number} is no completion or chat completion: {what}; write one with "
                "jax-specdec demo --json FILE"
            ) from error
    if not shown:
        raise ViewError("there is no response in it: one JSON object a line is expected")
    return shown


def page(responses: Sequence[Shown], title: str) -> str:
    """A whole HTML document, without any reference to something outside of it."""
    parts = Path(__file__).with_name("page")
    style = (parts / "page.css").read_text(encoding="utf-8")
    script = (parts / "page.js").read_text(encoding="utf-8")
    # The browser runs this script and no other: not one that a token could smuggle in.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # One pass, as the data may hold the names of the places.
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
    """What the page's script reads: strings once, in a list, and their indices in columns."""
    strings: dict[str, int] = {}

    def index(text: str) -> int:
        return strings.setdefault(text, len(strings))

    requests = [_columns(one, index) for one in responses]
    return {"strings": list(strings), "requests": requests}


def script_data(value: Any) -> str:
    """JSON that is harmless inside a `<script>` element: no `<`, so that none can end there."""
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
        "kinds": one.kinds and [KINDS.index(kind) for kind in one.kinds],
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
    """One for each choice of a response."""
    choices = value["choices"]
    return [
        _response(value, choice, f"{value['id']}" + (f" #{n}" if len(choices) > 1 else ""))
        for n, choice in enumerate(choices)
    ]


def _response(value: Any, choice: Any, name: str) -> Shown:
    extension = value.get("speculation") or {}
    tokens, logprobs, top = _tokens(choice, extension)
    if logprobs == [] and not tokens:
        logprobs = None
    columns = {key: extension.get(key) for key in ("token_ids", "token_ranks", "token_kinds")}
    for key, column in columns.items():
        if column is not None and len(column) != len(tokens):
            raise ValueError(f"{key} has length {len(column)} for {counted(len(tokens), 'token')}")
    for kind in columns["token_kinds"] or ():
        if kind not in KINDS:
            raise ValueError(f"token_kinds has {kind!r}; known are {', '.join(KINDS)}")
    steps = [_step(step) for step in extension.get("by_step") or ()]
    if steps and sum(step.num_tokens for step in steps) != len(tokens):
        raise ValueError(f"by_step does not add up to {counted(len(tokens), 'token')}")
    temperature, reason = extension.get("temperature"), choice.get("finish_reason")
    return Shown(
        id=name,
        model=str(value.get("model") or ""),
        prompt=str(extension.get("prompt") or ""),
        finish_reason=None if reason is None else str(reason),
        temperature=None if temperature is None else float(temperature),
        mode=extension.get("logprobs_mode"),
        tokens=tokens,
        logprobs=logprobs,
        top=top,
        ids=_integers(columns["token_ids"]),
        ranks=_integers(columns["token_ranks"]),
        kinds=columns["token_kinds"],
        steps=steps,
    )


def _tokens(
    choice: Any, extension: Any
) -> tuple[list[str], list[float | None] | None, list[Top] | None]:
    """Strings, logprobs and top K; the whole text as one token where nothing tells tokens."""
    logprobs = choice.get("logprobs")
    if logprobs is None:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        known = extension.get("tokens", [text] if text else [])
        return [str(token) for token in known], None, None
    if "content" in logprobs:
        content = logprobs["content"] or []
        return (
            [str(entry["token"]) for entry in content],
            [_number(entry["logprob"]) for entry in content],
            [[_candidate(c["token"], c["logprob"]) for c in e["top_logprobs"]] for e in content],
        )
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    if len(values) != len(tokens):
        raise ValueError(
            f"token_logprobs has length {len(values)} for {counted(len(tokens), 'token')}"
        )
    tops = logprobs.get("top_logprobs") or [{} for _ in tokens]
    if len(tops) != len(tokens):
        raise ValueError(f"top_logprobs has length {len(tops)} for {counted(len(tokens), 'token')}")
    return (
        [str(token) for token in tokens],
        [_number(value) for value in values],
        [[_candidate(text, value) for text, value in (top or {}).items()] for top in tops],
    )


def _candidate(text: Any, logprob: Any) -> tuple[str, float | None]:
    return str(text), _number(logprob)


def _step(value: Any) -> Step:
    texts, logprobs = value.get("draft_tokens") or [], value.get("draft_logprobs")
    logprobs = [None] * len(texts) if logprobs is None else logprobs
    return Step(
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
    """As a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    for character, name in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(character, f"&{name};")
    return text
