"""Responses as a page shows them: tokens as NumPy columns, strings by their index.

A response is one of the completions or the chat completions API, whole. What speculation did comes
from the extension beside it (`openai_extension.py`), which it may lack. A prompt's logprobs come
from the extension too, from vLLM's `prompt_logprobs`, or from `echo`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.token_columns import Ragged
from jax_specdec.wording import pluralize

# The values of `Shown.kinds`, in the order of the page's script.
CODES_OF_KINDS = {"accepted": 0, "recovered": 1, "bonus": 2, "plain": 3}
PROMPT, UNKNOWN_KIND = 4, 255
NO_LOGPROB = np.float32(np.inf)  # in `Shown.logprobs`: no logprob was asked for
UNKNOWN = -1  # in `Shown.ids` and `Shown.ranks`


class Strings(dict[str, int]):
    """Strings to their numbers, each numbered on its first use."""

    def __missing__(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a string")
        number = self[text] = len(self)
        return number

    def numbers(self, texts: Sequence[str]) -> NDArray[np.int32]:
        """[n] int32 of n strings."""
        return np.fromiter(map(self.__getitem__, texts), np.int32, len(texts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shown:
    """One choice of a response: n tokens, p of them the prompt's, in S steps.

    Attributes:
      id, model, prompt: texts; `prompt` is "" where the prompt's tokens are shown instead.
      finish_reason, temperature, mode: None where the response does not say.
      num_prompt: p; the prompt's tokens come first.
      tokens: [n] int32, numbers of strings.
      logprobs: [n] float32; NaN in an invalid row and for a prompt's first token, NOT_ASKED where
        there is none.
      ids, ranks: [n] int32; UNKNOWN where the response does not say. Rank 0 is an invalid row.
      kinds: [n] uint8, a value of KINDS, PROMPT or UNKNOWN_KIND.
      top: each token's top K, most likely first; its ids are numbers of strings.
      steps: [S, 4] int32: the step, its tokens, drafts and accepted drafts. The tokens add up to
        n - p.
      drafts: each step's drafts, as far as they were sent; its ids are numbers of strings.
    """

    id: str
    model: str
    prompt: str
    finish_reason: str | None
    temperature: float | None
    mode: str | None
    num_prompt: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ids: NDArray[np.int32]
    ranks: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    top: Ragged
    steps: NDArray[np.int32]
    drafts: Ragged


def shown_of(response: Any, strings: Strings) -> list[Shown]:
    """The choices of a response as a page shows them: one `Shown` each.

    Raises:
      KeyError, TypeError, ValueError, AttributeError, OverflowError: it is not a response.
    """
    choices = response["choices"]
    return [
        _shown(response, choice, f"{response['id']}" + (f" #{n}" if len(choices) > 1 else ""),
               strings)
        for n, choice in enumerate(choices)
    ]  # fmt: skip


@dataclass(slots=True)
class _Rows:
    """The tokens of a response as lists, before they become arrays; `top` is flat."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)
    ranks: list[Any] = field(default_factory=list)
    num_top: list[int] = field(default_factory=list)
    top_tokens: list[str] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)

    def add_top(self, candidates: Mapping[str, Any] | None) -> None:
        """Add the top K of the next token, by string."""
        candidates = candidates or {}
        self.num_top.append(len(candidates))
        self.top_tokens += candidates
        self.top_logprobs += candidates.values()


def _shown(response: Any, choice: Any, name: str, strings: Strings) -> Shown:
    extension = response.get("speculation") or {}
    rows = _Rows()
    num_prompt = _add_prompt(rows, response, choice, extension)
    prompt = str(extension.get("prompt") or "")
    _add_tokens(rows, choice, extension)
    echoed = 0 if num_prompt else _num_echoed(rows, response)
    num_prompt += echoed
    emitted = len(rows.tokens) - num_prompt
    ids = _column(extension, "token_ids", emitted, UNKNOWN)
    ranks = _column(extension, "token_ranks", emitted, UNKNOWN)
    rows.ids += [UNKNOWN] * (num_prompt - len(rows.ids))
    rows.ranks += [UNKNOWN] * (num_prompt - len(rows.ranks))
    kinds = np.full(len(rows.tokens), UNKNOWN_KIND, np.uint8)
    kinds[:num_prompt] = PROMPT
    kinds[num_prompt:] = _kinds(extension, emitted)
    reason, temperature = choice.get("finish_reason"), extension.get("temperature")
    if temperature is not None and not math.isfinite(float(temperature)):
        raise ValueError(f"temperature = {temperature} must be a finite number")
    mode = extension.get("logprobs_mode")
    steps, drafts = _steps(extension, emitted, strings)
    return Shown(
        id=name,
        model=str(response.get("model") or ""),
        prompt="" if num_prompt else prompt,
        finish_reason=None if reason is None else str(reason),
        temperature=None if temperature is None else float(temperature),
        mode=None if mode is None else str(mode),
        num_prompt=num_prompt,
        tokens=strings.numbers(rows.tokens),
        logprobs=np.array(rows.logprobs, np.float32),
        ids=np.array(rows.ids + ids, np.int32),
        ranks=np.array(rows.ranks + ranks, np.int32),
        kinds=kinds,
        top=_ragged(rows.num_top, rows.top_tokens, rows.top_logprobs, strings),
        steps=steps,
        drafts=drafts,
    )


def _add_prompt(rows: _Rows, response: Any, choice: Any, extension: Any) -> int:
    """Add the prompt's tokens where their logprobs are known; returns how many there are."""
    if entries := extension.get("prompt_logprobs"):
        # What was not scored is one token: the first, or all up to where the rows start.
        start = int(extension.get("prompt_logprobs_start") or 1)
        scored_entries = entries if start > 1 else entries[1:]
        rows.tokens.append(_first_token(str(extension.get("prompt") or ""), scored_entries))
        rows.logprobs.append(None)
        rows.add_top(None)
        _add_chat(rows, scored_entries)
        ids = extension.get("prompt_token_ids") or []
        first = ids[:1] if start == 1 else [UNKNOWN]
        unknown = [UNKNOWN] * (1 + len(scored_entries))
        rows.ids += [*first, *ids[start:]] if len(ids) == start + len(scored_entries) else unknown
        rows.ranks += unknown
    elif entries := choice.get("prompt_logprobs") or response.get("prompt_logprobs"):
        for entry in entries:  # vLLM's: {id: {"logprob", "rank", "decoded_token"}}, its own first
            _add_by_id(rows, entry or {})
    return len(rows.tokens)


def _first_token(prompt: str, entries: Sequence[Any]) -> str:
    """The string of what comes before the known tokens: what these leave of the text."""
    rest = b"".join(bytes(entry["bytes"] or ()) for entry in entries)
    text = prompt.encode(errors="surrogatepass")
    return text.removesuffix(rest).decode(errors="replace") if text.endswith(rest) else ""


def _add_by_id(rows: _Rows, entry: Mapping[str, Any]) -> None:
    no_entry: tuple[Any, Mapping[str, Any]] = (UNKNOWN, {})
    id, token_entry = next(iter(entry.items()), no_entry)
    rows.tokens.append(token_entry.get("decoded_token") or "")
    rows.logprobs.append(token_entry.get("logprob"))
    rows.ids.append(int(id))
    rows.ranks.append(token_entry.get("rank") or UNKNOWN)
    values: list[Mapping[str, Any]] = list(entry.values())
    ordered = sorted(values, key=lambda candidate: -float(candidate["logprob"]))
    rows.add_top(
        {candidate.get("decoded_token") or "": candidate["logprob"] for candidate in ordered}
    )


def _num_echoed(rows: _Rows, response: Any) -> int:
    """How many of the tokens are the prompt's, in a response with `echo`."""
    usage = response.get("usage") or {}
    echoed = int(usage.get("prompt_tokens") or 0)
    if rows.logprobs and len(rows.tokens) == echoed + int(usage.get("completion_tokens") or 0):
        return echoed
    return 0


def _add_tokens(rows: _Rows, choice: Any, extension: Any) -> None:
    """Add the emitted tokens; a text without tokens counts as one token."""
    logprobs = choice.get("logprobs")
    if logprobs is None:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        token_texts = extension.get("tokens", [text] if text else [])
        rows.tokens += map(str, token_texts)
        rows.logprobs += [NO_LOGPROB] * len(token_texts)
        rows.num_top += [0] * len(token_texts)
    elif "content" in logprobs:
        _add_chat(rows, logprobs["content"] or [])
    else:
        tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
        tops = logprobs.get("top_logprobs") or [None] * len(tokens)
        _check_length("token_logprobs", values, len(tokens))
        _check_length("top_logprobs", tops, len(tokens))
        rows.tokens += tokens
        rows.logprobs += values
        for top in tops:
            rows.add_top(top)


def _add_chat(rows: _Rows, entries: Iterable[Any]) -> None:
    for entry in entries:
        top = entry["top_logprobs"]
        rows.tokens.append(entry["token"])
        rows.logprobs.append(entry["logprob"])
        rows.num_top.append(len(top))
        rows.top_tokens += [candidate["token"] for candidate in top]
        rows.top_logprobs += [candidate["logprob"] for candidate in top]


def _column(extension: Any, name: str, num_tokens: int, missing: int) -> list[Any]:
    """A column of the extension, which must have a value for each token where it is there."""
    column = extension.get(name)
    if column is None:
        return [missing] * num_tokens
    _check_length(name, column, num_tokens)
    return list(column)


def _kinds(extension: Any, num_tokens: int) -> list[int]:
    if extension.get("token_kinds") is None:
        return [UNKNOWN_KIND] * num_tokens
    names = _column(extension, "token_kinds", num_tokens, 0)
    for name in names:
        if name not in CODES_OF_KINDS:
            raise ValueError(f"token_kinds has {name!r}; known are {', '.join(CODES_OF_KINDS)}")
    return [CODES_OF_KINDS[name] for name in names]


def _steps(extension: Any, num_tokens: int, strings: Strings) -> tuple[NDArray[np.int32], Ragged]:
    by_step = extension.get("by_step") or ()
    names = ("step", "num_tokens", "num_drafts", "num_accepted")
    rows = [[step[name] for name in names] for step in by_step]
    steps = np.array(rows, np.int32).reshape(-1, len(names))
    if rows and steps[:, 1].sum() != num_tokens:
        raise ValueError(f"by_step does not add up to {pluralize(num_tokens, 'token')}")
    texts: list[str] = []
    logprobs: list[Any] = []
    counts = []
    for step in by_step:
        drafts = step.get("draft_tokens") or []
        values = step.get("draft_logprobs")
        values = [None] * len(drafts) if values is None else values
        _check_length("draft_logprobs", values, len(drafts), "draft")
        texts += drafts
        logprobs += values
        counts.append(len(drafts))
    return steps, _ragged(counts, texts, logprobs, strings)


def _ragged(counts: list[int], texts: list[str], logprobs: list[Any], strings: Strings) -> Ragged:
    return Ragged.of(
        np.array(counts, np.int64), strings.numbers(texts), np.array(logprobs, np.float32)
    )


def _check_length(name: str, values: Any, num_tokens: int, noun: str = "token") -> None:
    if len(values) != num_tokens:
        raise ValueError(f"{name} has length {len(values)} for {pluralize(num_tokens, noun)}")
