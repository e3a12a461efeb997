"""A checked body to what the engine and the answer need."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ipc.wire import LogprobsMode
from jax_specdec.requests import Request, RequestError, SamplingParams, biases_of_json
from jax_specdec.serve import fields, tools
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.checks import check_body
from jax_specdec.serve.errors import unfit
from jax_specdec.serve.model import ServedModel
from jax_specdec.serve.tools import structure_of


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """One HTTP request for tokens.

    Attributes:
      id: of the response.
      body: what came, with defaults: its fields say what is not said here.
      chat: it has the chat format.
      requests: one for each choice, in their order.
      prompts: how many prompts they have among them; each has `n` choices.
      include_usage: a last chunk has the numbers of tokens.
      echo: the text begins with the prompt.
      score_only: the emitted token is dropped: only the prompt was asked for.
      logprobs: K of the format's logprobs; None for none.
      stops: strings that end the text.
      prompt_logprobs: the answer has the prompt's, as vLLM writes them.
      speculation: it has what speculation did.
      calls: the text may have a call of a function.
    """

    id: str
    body: Mapping[str, Any]
    chat: bool
    requests: tuple[Request, ...]
    prompts: int
    include_usage: bool
    echo: bool
    score_only: bool
    logprobs: int | None
    stops: tuple[str, ...]
    prompt_logprobs: bool
    speculation: bool
    calls: bool


def completion(body: Any, model: ServedModel, bounds: Bounds) -> ParsedRequest:
    """What a body of the completions API asks for.

    Raises:
      ApiError: it is not served.
    """
    given = check_body(body, fields.COMPLETION, "prompt")
    prompt, max_tokens, echo = given["prompt"], given["max_tokens"], given["echo"]
    # A text, several, ids, or several lists of ids.
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    prompts = [model.encoder.encode(x) if isinstance(x, str) else tuple(x) for x in several]
    if max_tokens == 0 and not echo and "prompt_logprobs" not in given:
        raise unfit(
            "max_tokens",
            "max_tokens = 0 scores the prompt and decodes nothing: it needs echo or "
            "prompt_logprobs, which show that",
        )
    return _asked(
        given, model, bounds, prompts,
        chat=False, max_tokens=max_tokens, logprobs=given.get("logprobs"), echo=echo,
    )  # fmt: skip


def chat(body: Any, model: ServedModel, bounds: Bounds) -> ParsedRequest:
    """What a body of the chat completions API asks for.

    Raises:
      ApiError: it is not served.
    """
    given = check_body(body, fields.CHAT, "messages")
    try:
        functions, _ = tools.offered(given)
        messages = [_plain(one) for one in given["messages"]]
        prompt = model.encoder.encode_chat(messages, functions)
    except ValueError as error:  # no template, or it refuses them
        raise unfit("messages", str(error)) from error
    if "top_logprobs" in given and not given["logprobs"]:
        raise unfit("top_logprobs", "top_logprobs needs logprobs = true")
    logprobs = given.get("top_logprobs", 0) if given["logprobs"] else None
    limits = [given[name] for name in ("max_completion_tokens", "max_tokens") if name in given]
    left = max(model.max_length - len(prompt), 1)
    return _asked(
        given, model, bounds, [prompt],
        chat=True, max_tokens=limits[0] if limits else left, logprobs=logprobs, echo=False,
    )  # fmt: skip


def _asked(
    given: Mapping[str, Any],
    model: ServedModel,
    bounds: Bounds,
    prompts: list[tuple[int, ...]],
    *,
    chat: bool,
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
) -> ParsedRequest:
    model.check_name(given.get("model", model.name))
    n, stop, options = given["n"], given.get("stop", ()), given.get("stream_options", {})
    if n * len(prompts) > fields.MAX_CHOICES:
        raise unfit(
            "n",
            f"n = {n} for {len(prompts)} prompts: a request may have {fields.MAX_CHOICES} choices",
        )
    if options and not given["stream"]:
        raise unfit("stream_options", "stream_options needs stream = true")
    longest = max(map(len, prompts))
    if longest + max(max_tokens, 1) > model.max_length:
        raise unfit(
            "prompt" if longest >= model.max_length else "max_tokens",
            f"{longest} prompt tokens and max_tokens = {max_tokens} exceed the {model.max_length} "
            "tokens of a request: shorten one of them, or serve with a larger --max-length",
            code="context_length_exceeded",
        )
    params = _params(given, model, max_tokens=max_tokens, logprobs=logprobs, echo=echo)
    _check_prompt_logprobs(params.prompt_logprobs, sum(map(len, prompts)), n, bounds)
    id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    try:
        requests = tuple(
            Request(
                id=f"{id}-{n * at + choice}",
                prompt_token_ids=prompt,
                params=replace(params, seed=params.seed + choice),
            )
            for at, prompt in enumerate(prompts)
            for choice in range(n)
        )
    except RequestError as error:
        raise unfit("prompt", str(error)) from error
    reported = ("speculation", "draft_logprobs", "extra_token_ids", "kept_token_ids")
    return ParsedRequest(
        id=id,
        body=given,
        chat=chat,
        requests=requests,
        prompts=len(prompts),
        include_usage=bool(options.get("include_usage")),
        echo=echo,
        score_only=max_tokens == 0,
        logprobs=logprobs,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        prompt_logprobs="prompt_logprobs" in given,
        speculation=any(given.get(name) for name in reported),
        calls=bool(tools.offered(given)[0]),
    )


# Numbers that `SamplingParams` has under the same names; a body may have whole ones.
_NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def _params(
    given: Mapping[str, Any],
    model: ServedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
) -> SamplingParams:
    """How the tokens of every choice are made, except for its seed."""
    asked = (given.get("prompt_logprobs"), logprobs if echo else None)
    prompt_k = max((k for k in asked if k is not None), default=None)
    for name, k in (("logprobs", logprobs), ("prompt_logprobs", prompt_k)):
        if k is not None and k > model.vocab_size:
            raise unfit(name, f"{name} = {k}, but the vocabulary has {model.vocab_size} tokens")
    bias = given.get("logit_bias", {})  # whose names are decimal numbers
    if unknown := [name for name in bias if int(name) >= model.vocab_size]:
        raise unfit(
            "logit_bias",
            f"logit_bias: token id {unknown[0]} is outside the vocabulary (0 to "
            f"{model.vocab_size - 1})",
        )
    numbers: dict[str, Any] = {name: float(given[name]) for name in _NUMBERS}
    eos = () if given["ignore_eos"] else model.eos_token_ids
    try:
        return SamplingParams(
            **numbers,
            max_tokens=max(max_tokens, 1),
            top_k=max(given["top_k"], 0),
            seed=given["seed"] if "seed" in given else secrets.randbits(32),
            stop_token_ids=tuple(dict.fromkeys((*eos, *given.get("stop_token_ids", ())))),
            logprobs=None if max_tokens == 0 else logprobs,
            logprobs_mode=LogprobsMode[given["logprobs_mode"].upper()],
            extra_token_ids=tuple(given.get("extra_token_ids", ())),
            draft_logprobs=given["draft_logprobs"],
            prompt_logprobs=prompt_k,
            kept_token_ids=given["kept_token_ids"],
            logit_bias=biases_of_json(bias),
            min_tokens=given["min_tokens"],
            structured=structure_of(given),
        )
    except RequestError as error:  # the first field that it names is the one that it is about
        named = (word for word in re.findall(r"\w+", str(error)) if word in given)
        raise unfit(next(named, None), str(error)) from error


def _check_prompt_logprobs(k: int | None, num_tokens: int, n: int, bounds: Bounds) -> None:
    """Refuse more logprobs of prompts than one answer may have."""
    most = bounds.max_prompt_logprobs
    if k is not None and (asked := num_tokens * max(k, 1) * n) > most:
        raise unfit(
            "prompt_logprobs",
            f"{num_tokens} prompt tokens with K = {k} in {n} choices are {asked} logprobs of "
            f"prompts, and a request may ask for {most} (--max-prompt-logprobs): lower K or n, or "
            "send several requests",
        )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its parts of text joined, and its calls' arguments as objects, as templates
    have them.

    Raises:
      ValueError: it says nothing, or arguments are no JSON object.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not calls:
        raise ValueError(f"a message of the role {message['role']} has no content")
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content or ())
    plain = {**message, "content": content}
    if calls:
        plain["tool_calls"] = [tools.with_object(one) for one in calls]
    return plain
