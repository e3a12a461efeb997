"""A checked body to what the engine and the answer need."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ipc.wire import LogprobsMode
from jax_specdec.requests import Request, RequestError, SamplingParams, biases_of_json
from jax_specdec.serve import fields
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.checks import check_body
from jax_specdec.serve.errors import ApiError
from jax_specdec.serve.model import ServedModel


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """One HTTP request for tokens.

    Attributes:
      id: of the response.
      chat: it has the chat format.
      requests: one for each choice, in their order.
      prompts: how many prompts they have among them; each has `n` choices.
      stream: the answer comes in chunks.
      include_usage: a last chunk has the numbers of tokens.
      echo: the text begins with the prompt.
      score_only: the emitted token is dropped: only the prompt was asked for.
      logprobs: K of the format's logprobs; None for none.
      stops: strings that end the text.
      keep_stop: they belong to the text.
      prompt_logprobs: the answer has the prompt's, as vLLM writes them.
      token_ids: it has the ids of prompt and text.
      speculation: it has what speculation did.
      columns: logprobs come as arrays in base64, and not as objects.
      priority: lower ones come first.
    """

    id: str
    chat: bool
    requests: tuple[Request, ...]
    prompts: int
    stream: bool
    include_usage: bool
    echo: bool
    score_only: bool
    logprobs: int | None
    stops: tuple[str, ...]
    keep_stop: bool
    prompt_logprobs: bool
    token_ids: bool
    speculation: bool
    columns: bool
    priority: int


def completion(body: Any, model: ServedModel, bounds: Bounds) -> ParsedRequest:
    """What a body of the completions API asks for.

    Raises:
      ApiError: it is not served.
    """
    given = check_body(body, fields.COMPLETION, "prompt")
    prompts = [
        model.encoder.encode(one) if isinstance(one, str) else tuple(one)
        for one in _prompts(given["prompt"])
    ]
    max_tokens, echo = given.get("max_tokens", 16), given.get("echo", False)
    if max_tokens == 0 and not echo and "prompt_logprobs" not in given:
        raise ApiError(
            400,
            "max_tokens = 0 scores the prompt and decodes nothing: it needs echo or "
            "prompt_logprobs, which show that",
            param="max_tokens",
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
        prompt = model.encoder.encode_chat([_plain(one) for one in given["messages"]])
    except ValueError as error:  # no template, or it refuses them
        raise ApiError(400, str(error), param="messages") from error
    if "top_logprobs" in given and not given.get("logprobs", False):
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
    logprobs = given.get("top_logprobs", 0) if given.get("logprobs", False) else None
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
    n = given.get("n", 1)
    if n * len(prompts) > fields.MAX_CHOICES:
        raise ApiError(
            400,
            f"n = {n} for {len(prompts)} prompts: a request may have {fields.MAX_CHOICES} choices",
            param="n",
        )
    for prompt in prompts:
        if len(prompt) + max(max_tokens, 1) > model.max_length:
            raise ApiError(
                400,
                f"{len(prompt)} prompt tokens and max_tokens = {max_tokens} exceed the "
                f"{model.max_length} tokens of a request: shorten one of them",
                param="prompt" if len(prompt) >= model.max_length else "max_tokens",
                code="context_length_exceeded",
            )
    params = _params(given, model, max_tokens=max_tokens, logprobs=logprobs, echo=echo)
    _check_prompt_logprobs(params.prompt_logprobs, sum(map(len, prompts)), n, bounds)
    id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    requests: list[Request] = []
    for prompt in prompts:
        for choice in range(n):
            seeded = replace(params, seed=(params.seed + choice) % 2**32)
            try:
                requests.append(
                    Request(id=f"{id}-{len(requests)}", prompt_token_ids=prompt, params=seeded)
                )
            except RequestError as error:
                raise ApiError(400, str(error), param="prompt") from error
    stop = given.get("stop", ())
    columns = given.get("logprobs_columns", False)
    options = given.get("stream_options", {})
    if options and not given.get("stream", False):
        raise ApiError(400, "stream_options needs stream = true", param="stream_options")
    return ParsedRequest(
        id=id,
        chat=chat,
        requests=tuple(requests),
        prompts=len(prompts),
        stream=given.get("stream", False),
        include_usage=bool(options.get("include_usage")),
        echo=echo,
        score_only=max_tokens == 0,
        logprobs=logprobs,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        keep_stop=given.get("include_stop_str_in_output", False),
        prompt_logprobs="prompt_logprobs" in given,
        token_ids=given.get("return_token_ids", False),
        speculation=any(
            given.get(name)
            for name in ("speculation", "draft_logprobs", "extra_token_ids", "kept_token_ids")
        ),
        columns=columns,
        priority=given.get("priority", 0),
    )


def _params(
    given: Mapping[str, Any],
    model: ServedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
) -> SamplingParams:
    """How the tokens of every choice are made, but for its seed."""
    prompt_k = [given[name] for name in ("prompt_logprobs",) if name in given]
    if echo and logprobs is not None:
        prompt_k.append(logprobs)
    for name, k in (("logprobs", logprobs), ("prompt_logprobs", max(prompt_k, default=None))):
        if k is not None and k > model.vocab_size:
            raise ApiError(
                400, f"{name} = {k}, but the vocabulary has {model.vocab_size} tokens", param=name
            )
    min_tokens = given.get("min_tokens", 0)
    if min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens = {min_tokens} is over max_tokens = {max_tokens}: lower it, or raise "
            "max_tokens",
            param="min_tokens",
        )
    _check_biased(given.get("logit_bias", {}), model.vocab_size)
    eos = () if given.get("ignore_eos", False) else model.eos_token_ids
    try:
        return SamplingParams(
            max_tokens=max(max_tokens, 1),
            temperature=float(given.get("temperature", 1.0)),
            top_k=max(given.get("top_k", 0), 0),
            top_p=float(given.get("top_p", 1.0)),
            min_p=float(given.get("min_p", 0.0)),
            seed=given["seed"] if "seed" in given else secrets.randbits(32),
            stop_token_ids=tuple(dict.fromkeys((*eos, *given.get("stop_token_ids", ())))),
            logprobs=None if max_tokens == 0 else logprobs,
            logprobs_mode=LogprobsMode[given.get("logprobs_mode", "raw").upper()],
            extra_token_ids=tuple(given.get("extra_token_ids", ())),
            draft_logprobs=given.get("draft_logprobs", False),
            prompt_logprobs=max(prompt_k, default=None),
            kept_token_ids=given.get("kept_token_ids", False),
            presence_penalty=float(given.get("presence_penalty", 0.0)),
            frequency_penalty=float(given.get("frequency_penalty", 0.0)),
            repetition_penalty=float(given.get("repetition_penalty", 1.0)),
            logit_bias=biases_of_json(given.get("logit_bias", {})),
            min_tokens=min_tokens,
        )
    except RequestError as error:
        said = str(error)
        named = [one for one in given if one in said]  # the first one is what it is about
        raise ApiError(400, said, param=min(named, key=said.index, default=None)) from error


def _check_prompt_logprobs(k: int | None, num_tokens: int, n: int, bounds: Bounds) -> None:
    """Refuse more logprobs of prompts than one answer may have."""
    most = bounds.max_prompt_logprobs
    if k is not None and (asked := num_tokens * max(k, 1) * n) > most:
        raise ApiError(
            400,
            f"{num_tokens} prompt tokens with K = {k} in {n} choices are {asked} logprobs of "
            f"prompts, and a request may ask for {most} (--max-prompt-logprobs): lower K or n, or "
            "send several requests",
            param="prompt_logprobs",
        )


def _check_biased(bias: Mapping[str, float], vocab_size: int) -> None:
    """Refuse a bias for a token that the model does not have; the names are decimal numbers."""
    for name in bias:
        if int(name) >= vocab_size:
            raise ApiError(
                400,
                f"logit_bias: token id {name} is outside the vocabulary (0 to {vocab_size - 1})",
                param="logit_bias",
            )


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of the field: a text, several, ids, or several lists of ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its parts of text joined: templates know no parts."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}
