"""A checked body to what the engine and the answer need."""

import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

from ipc.wire import LogprobsMode
from jax_specdec.requests import (
    Request,
    RequestError,
    SamplingParams,
    biases_of_json,
    token_id_rows,
)
from jax_specdec.serve import tools
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.checks import checked
from jax_specdec.serve.errors import unfit
from jax_specdec.serve.fields import MAX_CHOICES, Body, Chat, ChatMessage, Completion
from jax_specdec.serve.model import ServedModel
from jax_specdec.text.chat_template import RESERVED


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """One HTTP request for tokens.

    Attributes:
      id: of the response.
      body: what came: its fields say what is not said here.
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
    body: Body
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


def parse_completion(body: Any, model: ServedModel, bounds: Bounds) -> ParsedRequest:
    """Read a body of the completions API.

    Raises:
      ApiError: it is not served.
    """
    fields = checked(body, Completion)
    prompt = fields.prompt
    # A text, several, ids, or several lists of ids.
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    try:
        prompts = [model.encoder.encode(x) if isinstance(x, str) else tuple(x) for x in several]
    except ValueError as error:  # a token is none of the model's
        raise unfit("prompt", str(error)) from error
    if fields.max_tokens == 0 and not fields.echo and fields.prompt_logprobs is None:
        raise unfit(
            "max_tokens",
            "max_tokens = 0 scores the prompt and decodes nothing: it needs echo or "
            "prompt_logprobs, which show that",
        )
    return _parsed(
        fields, model, bounds, prompts,
        max_tokens=fields.max_tokens, logprobs=fields.logprobs, echo=fields.echo,
    )  # fmt: skip


def parse_chat(body: Any, model: ServedModel, bounds: Bounds) -> ParsedRequest:
    """Read a body of the chat completions API.

    Raises:
      ApiError: it is not served.
    """
    fields = checked(body, Chat)
    options = fields.chat_template_kwargs
    if taken := sorted(RESERVED & options.keys()):
        raise unfit(
            "chat_template_kwargs",
            f"chat_template_kwargs: {taken[0]} is not the template's to be given: leave it out",
        )
    try:
        functions, _ = tools.offered(fields)
        messages = [_plain(message) for message in fields.messages]
        template_inputs = (messages, functions, options) if options else (messages, functions)
        prompt = model.encoder.encode_chat(*template_inputs)
    except (ValueError, RecursionError) as error:  # no template, or it refuses them
        raise unfit("messages", str(error)) from error
    if fields.top_logprobs and not fields.logprobs:
        raise unfit("top_logprobs", "top_logprobs needs logprobs = true")
    room = max(model.max_length - len(prompt), 1)
    return _parsed(
        fields, model, bounds, [prompt],
        max_tokens=fields.max_completion_tokens or fields.max_tokens or room,
        logprobs=fields.top_logprobs or 0 if fields.logprobs else None, echo=False,
    )  # fmt: skip


def _parsed(
    fields: Body,
    model: ServedModel,
    bounds: Bounds,
    prompts: list[tuple[int, ...]],
    *,
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
) -> ParsedRequest:
    model.check_name(model.name if fields.model is None else fields.model)
    n, options = fields.n, fields.stream_options
    if n * len(prompts) > MAX_CHOICES:
        raise unfit(
            "n",
            f"n = {n} for {len(prompts)} prompts: a request may have {MAX_CHOICES} choices",
        )
    if options and options.model_fields_set and not fields.stream:
        raise unfit("stream_options", "stream_options needs stream = true")
    longest = max(map(len, prompts))
    if longest + max(max_tokens, 1) > model.max_length:
        raise unfit(
            "prompt" if longest >= model.max_length else "max_tokens",
            f"{longest} prompt tokens and max_tokens = {max_tokens} exceed the {model.max_length} "
            "tokens of a request: shorten one of them, or serve with a larger --max-length",
            code="context_length_exceeded",
        )
    params = _params(fields, model, max_tokens=max_tokens, logprobs=logprobs, echo=echo)
    start = params.prompt_logprobs_start
    num_scored = sum(max(len(prompt) - start, 0) for prompt in prompts)
    _check_prompt_logprobs(params, num_scored, n, bounds)
    chat = isinstance(fields, Chat)
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
        named = "prompt_extra_token_ids" if fields.prompt_extra_token_ids else "prompt"
        field = "prompt_logprobs_start" if "prompt_logprobs_start" in str(error) else named
        raise unfit(field, str(error)) from error
    reported = (
        fields.speculation, fields.draft_logprobs, fields.extra_token_ids, fields.kept_token_ids,
        fields.entropy, fields.log_sum_exp, fields.row_digest,
    )  # fmt: skip
    return ParsedRequest(
        id=id,
        body=fields,
        chat=chat,
        requests=requests,
        prompts=len(prompts),
        include_usage=options is not None and options.include_usage,
        echo=echo,
        score_only=max_tokens == 0,
        logprobs=logprobs,
        stops=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        prompt_logprobs=fields.prompt_logprobs is not None,
        speculation=any(reported),
        calls=bool(tools.offered(fields)[0]),
    )


def _params(
    fields: Body,
    model: ServedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
) -> SamplingParams:
    """How the tokens of every choice are made, except for its seed."""
    prompt_ks = (fields.prompt_logprobs, logprobs if echo else None)
    prompt_k = max((k for k in prompt_ks if k is not None), default=None)
    if fields.prompt_logprobs_start and echo and logprobs is not None:
        raise unfit(
            "prompt_logprobs_start",
            f"prompt_logprobs_start = {fields.prompt_logprobs_start} with echo and logprobs, which "
            "show the whole prompt's: leave the start out, or echo, and ask for prompt_logprobs",
        )
    for name, k in (("logprobs", logprobs), ("prompt_logprobs", prompt_k)):
        if k is not None and k > model.vocab_size:
            raise unfit(name, f"{name} = {k}, but the vocabulary has {model.vocab_size} tokens")
    bias = fields.logit_bias  # whose names are decimal numbers
    if unknown := [name for name in bias if int(name) >= model.vocab_size]:
        raise unfit(
            "logit_bias",
            f"logit_bias: token id {unknown[0]} is outside the vocabulary (0 to "
            f"{model.vocab_size - 1})",
        )
    ids = fields.prompt_extra_token_ids
    if wrong := [id for row in ids or () for id in row if id >= model.vocab_size]:
        raise unfit(
            "prompt_extra_token_ids",
            f"prompt_extra_token_ids: token id {wrong[0]} is outside the vocabulary (0 to "
            f"{model.vocab_size - 1})",
        )
    eos = () if fields.ignore_eos else model.eos_token_ids
    try:
        return SamplingParams(
            temperature=fields.temperature,
            top_p=fields.top_p,
            min_p=fields.min_p,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            repetition_penalty=fields.repetition_penalty,
            max_tokens=max(max_tokens, 1),
            top_k=max(fields.top_k, 0),
            seed=secrets.randbits(32) if fields.seed is None else fields.seed,
            stop_token_ids=tuple(dict.fromkeys((*eos, *fields.stop_token_ids))),
            logprobs=None if max_tokens == 0 else logprobs,
            logprobs_mode=LogprobsMode[fields.logprobs_mode.upper()],
            extra_token_ids=tuple(fields.extra_token_ids),
            draft_logprobs=fields.draft_logprobs,
            prompt_logprobs=prompt_k,
            prompt_logprobs_start=fields.prompt_logprobs_start,
            prompt_extra_token_ids=None if ids is None else token_id_rows(ids),
            kept_token_ids=fields.kept_token_ids,
            entropy=fields.entropy and max_tokens > 0,
            log_sum_exp=fields.log_sum_exp and max_tokens > 0,
            row_digest=fields.row_digest and max_tokens > 0,
            logit_bias=biases_of_json(bias),
            min_tokens=fields.min_tokens,
            structured=tools.structure_of(fields),
        )
    except RequestError as error:  # the first field that it names is the one that it is about
        named = (word for word in re.findall(r"\w+", str(error)) if word in fields.model_fields_set)
        raise unfit(next(named, None), str(error)) from error


def _check_prompt_logprobs(params: SamplingParams, num_tokens: int, n: int, bounds: Bounds) -> None:
    """Refuse more logprobs of prompts than one answer may have."""
    most, k = bounds.max_prompt_logprobs, params.prompt_logprobs
    named = params.prompt_extra_token_ids
    width = max(k or 0, 1) + (0 if named is None else named.width)
    if k is not None and (entries := num_tokens * width * n) > most:
        raise unfit(
            "prompt_logprobs",
            f"{num_tokens} prompt tokens with K = {k} in {n} choices are {entries} logprobs of "
            f"prompts, and a request may ask for {most} (--max-prompt-logprobs): lower K or n, or "
            "send several requests",
        )


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message with its parts of text joined, and its calls' arguments as objects, as templates
    have them.

    Raises:
      ValueError: it says nothing, or arguments are no JSON object.
    """
    content = message.content
    if content is None and not message.tool_calls:
        raise ValueError(f"a message of the role {message.role} has no content")
    if not isinstance(content, str):
        content = "".join(part.text for part in content or ())
    plain = message.model_dump(exclude_unset=True) | {"content": content}
    if message.tool_calls:
        plain["tool_calls"] = [tools.with_object(call) for call in plain["tool_calls"]]
    return plain
