"""A model's own chat template: messages to the text that it was trained on. Never jax.

Templates are Jinja programs that come with a checkpoint. They run in Jinja's sandbox, which keeps
them from attributes and files, not from taking long. Needs the `hf` extra.

Source: https://huggingface.co/docs/transformers/chat_templating_writing
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.hf_config import read_json
from jax_specdec.checkpoint.model_config import CheckpointError

INSTALL = "pip install 'jax-specdec[hf]'"


class MissingExtra(ValueError):
    """What is asked needs a library of the `hf` extra; says how to install it."""


class ChatTemplate:
    """One template, compiled."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile it.

        Args:
          source: the Jinja text.
          special: names such as "bos_token" to the strings that the template may write.

        Raises:
          MissingExtra: jinja2 is not installed.
          CheckpointError: the template is no valid Jinja.
        """
        try:
            import jinja2
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
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template is no valid Jinja: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, up to where the model is to answer.

        Raises:
          CheckpointError: the template refuses these messages, in its own words.
        """
        try:
            # Tools and documents are defined and None, as where transformers is given none.
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except (self._error, TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the chat template refuses these messages: {error}") from error


def read_template(directory: Path) -> ChatTemplate | None:
    """The chat template of a model directory, from chat_template.jinja or tokenizer_config.json.

    Of several, the one named "default" is meant. None where there is none.

    Raises:
      MissingExtra: there is one, and jinja2 is not installed.
      CheckpointError: it is no valid template.
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
                f"{path} has chat templates {', '.join(named)}, but none named default"
            )
    if source is None:
        return None
    older = directory / "special_tokens_map.json"
    named_tokens = (read_json(older) if older.is_file() else {}) | config
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in named_tokens.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return ChatTemplate(source, special)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> None:
    raise ValueError(reason)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
