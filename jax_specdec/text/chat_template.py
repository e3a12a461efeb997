"""A model's own chat template: messages to the text that it was trained on.

Templates are Jinja programs that come with a checkpoint (extra `hf`). Jinja's sandbox keeps them
from attributes and files, but not from running for a long time.

Source: https://huggingface.co/docs/transformers/chat_templating_writing
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.hf_config import read_json
from jax_specdec.checkpoint.model_config import CheckpointError

# The extra `hf`: these names are found wherever this package came from.
INSTALL = "pip install 'tokenizers>=0.20' 'jinja2>=3.1'"


FUNCTIONS = (
    "You can call one of the functions below. To call it, write <tool_call>, then on a line of its "
    'own {"name": its name, "arguments": an object with its parameters}, then </tool_call>.'
)


class MissingExtra(ValueError):
    """A library of the `hf` extra is missing; says how to install it."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
          source: the Jinja text.
          special: names such as "bos_token" to the strings that the template may write.

        Raises:
          MissingExtra: jinja2 is not installed.
          CheckpointError: the template is not valid Jinja.
        """
        try:
            import jinja2
            import jinja2.meta
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingExtra(f"chat templates need jinja2: {INSTALL}") from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special = dict(special)
        self._error = jinja2.TemplateError
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._has_tools = "tools" in names
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The text of a conversation, up to where the model is to answer.

        Args:
          messages: of the conversation.
          functions: that the model may call, each with a name. Where the template has no place for
            them, `with_functions` says them in the messages.

        Raises:
          CheckpointError: the template refuses these messages; says why in its own words.
        """
        try:
            if not self._has_tools:
                messages = with_functions(messages, functions)
            tools = [{"type": "function", "function": one} for one in functions]
            # Tools and documents are defined and None, as in transformers without any.
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except (self._error, TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the chat template refuses these messages: {error}") from error


def with_functions(
    messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Messages that say which functions there are, and in their texts what was called."""
    made: list[Mapping[str, Any]] = [
        {**one, "content": one["content"] + "".join(map(_call, one["tool_calls"]))}
        if one.get("tool_calls")
        else one
        for one in messages
    ]
    if not functions:
        return made
    listed = "\n".join(json.dumps(one, ensure_ascii=False) for one in functions)
    said = f"{FUNCTIONS}\n{listed}"
    if made and made[0]["role"] == "system":
        return [{**made[0], "content": f"{made[0]['content']}\n\n{said}"}, *made[1:]]
    return [{"role": "system", "content": said}, *made]


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    named = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(named, ensure_ascii=False)}\n</tool_call>"


def read_template(directory: Path) -> ChatTemplate | None:
    """The chat template of a model directory, or None.

    It stands in chat_template.jinja or in tokenizer_config.json; of several there, the one named
    "default" counts.

    Raises:
      MissingExtra: there is a template, and jinja2 is not installed.
      CheckpointError: the template is not valid Jinja, or several have no default.
    """
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    own_file = directory / "chat_template.jinja"
    source = (
        own_file.read_text(encoding="utf-8") if own_file.is_file() else config.get("chat_template")
    )
    if isinstance(source, list):
        named = {one["name"]: one["template"] for one in source}
        source = named.get("default")
        if source is None:
            raise CheckpointError(
                f"{path} has chat templates {', '.join(named)}, but none named default: rename the "
                "one to use"
            )
    return None if source is None else ChatTemplate(source, _special_tokens(directory, config))


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Names such as "bos_token" to their strings; tokenizer_config.json wins over an older file."""
    older = directory / "special_tokens_map.json"
    named_tokens = (read_json(older) if older.is_file() else {}) | config
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in named_tokens.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> None:
    raise ValueError(reason)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
