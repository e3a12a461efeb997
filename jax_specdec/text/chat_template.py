"""A model's own chat template: messages to the text that it was trained on.

Templates are Jinja programs that come with a checkpoint. transformers renders them (extra `hf`), in
Jinja's sandbox, which keeps them from attributes and files and bounds ranges. Here their time is
bounded, and a conversation is changed before, where a template does not know of a role or of
functions.

Source: https://huggingface.co/docs/transformers/chat_templating_writing
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.time_limit import run_within
from jax_specdec.text.transformers_library import INSTALL, MissingExtra, renderer

_FUNCTIONS = (
    "You can call one of the functions below. To call it, write <tool_call>, then on a line of its "
    'own {"name": its name, "arguments": an object with its parameters}, then </tool_call>.'
)
MAX_SECONDS = 10.0  # of one conversation
DEFAULT, WITH_TOOLS = "default", "tool_use"
# What the library's renderer gives a template itself.
RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "conversations", "conversation", "self", "chat_template", "tokenize",
    "return_assistant_tokens_mask",
})  # fmt: skip
_TAG_OF_TRANSFORMERS = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
_PROBE = "a-text-to-be-found"

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A template, or two: one for conversations with functions beside another.

    Attributes:
      texts: the literal strings in it.
    """

    def __init__(self, source: str | Mapping[str, str], special: Mapping[str, str]) -> None:
        """Look at a template.

        Args:
          source: the Jinja text; of several the one named "default" counts, and where there are
            functions, the one named "tool_use".
          special: names such as "bos_token" to the strings that the template may write.

        Raises:
          MissingExtra: jinja2 is not installed.
          CheckpointError: the template is not valid Jinja, or of several none is the default.
        """
        sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        if DEFAULT not in sources:
            raise CheckpointError(
                f"it has chat templates {', '.join(sources)}, but none named default: rename the "
                "one to use"
            )
        self._special = dict(special)
        self._default = _Source(sources[DEFAULT])
        self._with_tools = _Source(sources[WITH_TOOLS]) if WITH_TOOLS in sources else self._default
        self.texts = "\0".join({*self._default.literals, *self._with_tools.literals})

    def render(
        self,
        messages: Messages,
        functions: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, up to where the model is to answer.

        Args:
          messages: of the conversation. A "developer" is the system where the template does not
            name that role.
          functions: that the model may call, each with a name. Where the template has no place for
            them, `with_functions` says them in the messages.
          options: more that the template may look at, by name.

        Raises:
          CheckpointError: the template refuses these messages, in its own words, or takes longer
            than `MAX_SECONDS`; or an option has the name of what it is given anyway.
        """
        if taken := sorted(RESERVED & (options or {}).keys()):
            raise CheckpointError(f"the chat template gets {taken[0]} from the request itself")
        template = self._with_tools if functions else self._default
        plain = [
            {name: value for name, value in message.items() if value is not None}
            for message in messages
        ]
        if "developer" not in template.literals:
            plain = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in plain
            ]
        spoken: Messages = plain
        if not template.has_tools:
            spoken = with_functions(
                plain, functions,
                system=self._takes("system"), tool=self._takes("tool"),
            )  # fmt: skip
        tools = [{"type": "function", "function": function} for function in functions] or None
        try:
            return self._rendered(template, spoken, tools, options)
        except MissingExtra:
            raise
        except Exception as error:  # a template may raise whatever it likes
            why = f"{type(error).__name__}: {error}" if not str(error) else str(error)
            if spoken != plain and self._renders(template, plain, options):
                why = (
                    "it knows of no functions, so the server said them, and calls of them, in the "
                    f"messages, and it refuses that: {why}"
                )
            raise CheckpointError(f"the chat template refuses these messages: {why}") from error

    def _takes(self, role: str) -> bool:
        """Whether the text of a message of this role is in what the default template makes."""
        return self._roles[role]

    @cached_property
    def _roles(self) -> dict[str, bool]:
        user = {"role": "user", "content": "a"}
        system = [{"role": "system", "content": _PROBE}, user]
        answer = {"role": "assistant", "content": "b"}
        result = {"role": "tool", "content": _PROBE, "tool_call_id": "123456789", "name": "f"}
        return {
            "system": self._shows(system),
            "tool": self._shows([user, answer, result]),
        }

    def _shows(self, messages: Messages) -> bool:
        try:
            return _PROBE in self._rendered(self._default, messages, None, None)
        except MissingExtra:
            raise
        except Exception:  # whatever the template raises, it does not take them
            return False

    def _renders(
        self, template: "_Source", messages: Messages, options: Mapping[str, Any] | None
    ) -> bool:
        try:
            self._rendered(template, messages, None, options)
        except Exception:  # as above
            return False
        return True

    def _rendered(
        self,
        template: "_Source",
        messages: Messages,
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> str:
        """The text of messages by transformers, which gives a template nothing but plain JSON."""
        render = partial(
            renderer(), [list(messages)], tools=tools, chat_template=template.source,
            add_generation_prompt=True,
        )  # fmt: skip
        texts, _ = run_within(MAX_SECONDS, lambda: render(**{**self._special, **(options or {})}))
        return str(texts[0])


class _Source:
    """The text of a template, and what can be seen of it without running it.

    Attributes:
      source: the Jinja text.
      literals: the strings in it, and the texts between its tags.
      has_tools: it looks at the functions that there are.
    """

    def __init__(self, source: str) -> None:
        try:
            import jinja2
            import jinja2.meta
            from jinja2 import nodes
            from jinja2.ext import loopcontrols
        except ImportError as error:
            raise MissingExtra(f"chat templates need jinja2: {INSTALL}") from error
        self.source = source
        # A tag of transformers' own around what the model says, which changes no text.
        plain = _TAG_OF_TRANSFORMERS.sub(r"{%\1 set _ = 0 \2%}", source)
        try:
            parsed = jinja2.Environment(extensions=[loopcontrols]).parse(plain)
            self.has_tools = "tools" in jinja2.meta.find_undeclared_variables(parsed)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"the chat template is not valid Jinja: {error}") from error
        self.literals = {node.data for node in parsed.find_all(nodes.TemplateData)}
        self.literals |= {
            node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)
        }


def with_functions(
    messages: Messages,
    functions: Sequence[Mapping[str, Any]],
    *,
    system: bool = True,
    tool: bool = True,
) -> list[Mapping[str, Any]]:
    """Messages that say which functions there are, and in their texts what was called.

    Args:
      messages: of the conversation.
      functions: that the model may call.
      system: there is a role "system", which says the functions; otherwise the first user does.
      tool: there is a role "tool"; otherwise a user says what came of a call.
    """
    spoken: list[Mapping[str, Any]] = []
    behind_result = False
    for message in messages:
        if message.get("tool_calls"):
            calls = "".join(map(_call, message["tool_calls"]))
            message = {**message, "content": f"{message.get('content') or ''}{calls}"}
        is_result = message.get("role") == "tool" and not tool
        if is_result:
            message = {"role": "user", "content": _RESULT.format(message.get("content") or "")}
        # Users and assistants alternate in templates that know no other roles.
        if (is_result or behind_result) and spoken and _are_users(spoken[-1], message):
            spoken[-1] = {
                **spoken[-1],
                "content": f"{spoken[-1]['content']}\n\n{message['content']}",
            }
        else:
            spoken.append(message)
        behind_result = is_result
    if not functions:
        return spoken
    schemas = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    offer = f"{_FUNCTIONS}\n{schemas}"
    if not system:
        at = next((n for n, message in enumerate(spoken) if message.get("role") == "user"), None)
        if at is None:
            return [{"role": "user", "content": offer}, *spoken]
        first = {**spoken[at], "content": _joined(offer, spoken[at].get("content"))}
        return [*spoken[:at], first, *spoken[at + 1 :]]
    if spoken and spoken[0].get("role") in ("system", "developer"):
        return [{**spoken[0], "content": _joined(spoken[0].get("content"), offer)}, *spoken[1:]]
    return [{"role": "system", "content": offer}, *spoken]


_RESULT = "<tool_response>\n{}\n</tool_response>"


def _joined(text: Any, more: Any) -> Any:
    """Two texts, either of which may be none, or a list of parts."""
    if isinstance(text, list) or isinstance(more, list):
        lists = (content if isinstance(content, list) else [{"type": "text", "text": content}]
                 for content in (text, more))  # fmt: skip
        return [piece for content in lists for piece in content]
    return "\n\n".join(filter(None, (text, more)))


def _are_users(*messages: Mapping[str, Any]) -> bool:
    return all(
        message["role"] == "user" and isinstance(message["content"], str) for message in messages
    )


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    fields = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(fields, ensure_ascii=False)}\n</tool_call>"
