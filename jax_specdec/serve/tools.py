"""Calls of functions: what a body offers, the grammar of an answer with a call, and its parts.

A call is written as Hermes and Qwen models write it, whatever the model is:

    <tool_call>
    {"name": "FUNCTION", "arguments": {...}}
    </tool_call>
"""

import contextlib
import json
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_specdec.requests import RequestError, Structured
from jax_specdec.serve.errors import ApiError, unfit
from jax_specdec.serve.fields import Body, Chat, ResponseFormat, StructuredOutputs
from jax_specdec.serve.tool_faults import fault
from jax_specdec.serve.tool_schemas import for_grammar
from jax_specdec.structured.grammar import library

_Json = dict[str, Any]

BEGIN = "<tool_call>"
_NAME, _ARGUMENTS, _END = '\n{"name": "', '", "arguments": ', "}\n</tool_call>"
_LETTERS = string.ascii_letters + string.digits
# The lines of a grammar before those of the functions.
_LINES = {True: 1, False: 3}


def offered(fields: Body) -> tuple[list[_Json], bool]:
    """The functions that a body lets the model call, and whether it must call one.

    Raises:
      ApiError: a choice without functions, or of one that is not among them; a name comes twice.
    """
    if not isinstance(fields, Chat):
        return [], False
    functions = [function.function.set_fields() for function in fields.tools]
    names = [function["name"] for function in functions]
    choice = fields.tool_choice or ("auto" if functions else "none")
    if choice == "none":
        return [], False
    if len(set(names)) < len(names):
        raise unfit("tools", "tools: a name comes twice: names must differ")
    if not isinstance(choice, str):
        name = choice.function.name
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            known_names = ", ".join(names) or "none"
            raise unfit("tool_choice", f"tool_choice names {name!r}, and tools has {known_names}")
    elif not functions:
        raise unfit("tool_choice", f"tool_choice = {choice!r} needs tools")
    return functions, choice != "auto"


def grammar(functions: Sequence[Mapping[str, Any]], *, required: bool) -> Structured:
    """The grammar of an answer: a call, or, where none is required, text with or without one."""
    rules = []
    for number, function in enumerate(functions):
        schema = for_grammar(function)
        head, end = json.dumps(f"{_NAME}{function['name']}{_ARGUMENTS}"), json.dumps(_END)
        rules.append(f"call_{number}: {head} %json {json.dumps(schema)} {end}")
    calls = " | ".join(f"call_{number}" for number in range(len(functions)))
    if required:
        start = [f'start: "{BEGIN}" ({calls})']
    else:
        start = [
            f"start: TEXT | begin ({calls})",
            f'begin[lazy]: TEXT "{BEGIN}"',
            r"TEXT: /(.|\n)*/",
        ]
    return Structured("grammar", "\n".join([*start, *rules]))


@contextlib.contextmanager
def schema_errors(fields: Body) -> Iterator[None]:
    """Say in the errors of a body's functions which of them, and what in its schema, is wrong."""
    try:
        yield
    except ApiError as error:
        if error.param != "tools":
            raise
        functions, required = offered(fields)
        problem = fault(functions, _LINES[required] + 1, error.message)
        raise unfit("tools", f"tools: {problem}", error.code) from error


def structure_obstacle() -> str:
    """Why no structure of a text is served here, and the way out; empty where they are."""
    try:
        library()
    except RequestError as error:
        return str(error)
    return ""


def with_object(call: _Json) -> _Json:
    """An earlier call with its arguments as an object; an empty text of a call without any is {}.

    Raises:
      ValueError: they are not one.
    """
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"].strip() or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the call of {function['name']!r} are no JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def call_id() -> str:
    """A name of a call: nine letters and digits, as templates of Mistral's models want it."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class CallReader:
    """Tells the text of an answer from its call, as they come.

    Attributes:
      complete: the call has ended.
    """

    def __init__(self) -> None:
        self.complete = False
        self._held = ""  # what may belong to the next part
        self._state = "text"
        self._id = call_id()

    def push(self, text: str, *, over: bool = False) -> tuple[str, _Json | None]:
        """The text before the call that this brings, and what it adds to the call, if anything.

        Args:
          text: comes next.
          over: it is the last.

        Returns:
          An addition to a call is as in a chunk of OpenAI's: its first one has the name.
        """
        self._held += text
        prose = ""
        call: _Json | None = None
        if self._state == "text":
            prose, begin, rest = self._held.partition(BEGIN)
            if begin:
                self._state, self._held = "name", rest
            else:
                held_back = 0 if over else _overlap(prose, BEGIN)
                prose, self._held = prose[: len(prose) - held_back], prose[len(prose) - held_back :]
        if self._state == "name" and _ARGUMENTS in self._held:
            name, _, self._held = self._held.partition(_ARGUMENTS)
            self._state = "arguments"
            call = {"index": 0, "id": self._id, "type": "function",
                    "function": {"name": name.removeprefix(_NAME), "arguments": ""}}  # fmt: skip
        if self._state == "arguments":
            self.complete = over and self._held.endswith(_END)
            held_back = len(_END) if self.complete or not over else 0
            ready, self._held = _split(self._held, held_back)
            if ready:
                call = call or {"index": 0, "function": {"arguments": ""}}
                call["function"]["arguments"] = ready
        return prose, call


def _split(text: str, held_back: int) -> tuple[str, str]:
    """The text except for its last characters, and these."""
    place = max(len(text) - held_back, 0)
    return text[:place], text[place:]


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of a text may begin the word."""
    return next(n for n in range(min(len(text), len(word)), -1, -1) if text.endswith(word[:n]))


STRUCTURE_FIELDS = ("tools", "structured_outputs", "response_format")


def structure_of(fields: Body) -> Structured | None:
    """The structure of a body's text; None: anything.

    Raises:
      ApiError: it asks for two at once, for one that is not complete, or to go on after its end.
    """
    functions, required = offered(fields)
    try:
        calls = grammar(functions, required=required) if functions else None
    except (RecursionError, TypeError, ValueError) as error:
        raise unfit("tools", f"tools: parameters are no JSON schema: {error}") from error
    structures = {
        "response_format": _of_format(fields.response_format),
        "structured_outputs": _of_outputs(fields.structured_outputs),
        "tools": calls,
    }
    named = {name: structure for name, structure in structures.items() if structure is not None}
    if not named:
        return None
    if len(named) > 1:
        raise unfit([*named][1], f"{' and '.join(named)} each say what the text is: give one")
    ((name, structure),) = named.items()
    if fields.ignore_eos:
        raise unfit(name, f"ignore_eos with {name}: nothing comes after its end; leave one out")
    return structure


def _of_format(response_format: ResponseFormat | None) -> Structured | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return _of_schema({"type": "object"})
    if response_format.json_schema is None:
        raise unfit(
            "response_format",
            'response_format of type json_schema needs json_schema: {"name": ..., "schema": ...}',
        )
    return _of_schema(response_format.json_schema.schema_ or {})


def _of_outputs(outputs: StructuredOutputs | None) -> Structured | None:
    if outputs is None:
        return None
    named = {name.rstrip("_"): value for name, value in outputs if value not in (None, False)}
    if len(named) > 1:
        raise unfit(
            "structured_outputs", f"structured_outputs has {' and '.join(named)}: give one of them"
        )
    for name, value in named.items():
        if name == "json_object":
            return _of_schema({"type": "object"})
        if name == "json":
            return Structured("json_schema", value) if isinstance(value, str) else _of_schema(value)
        return Structured(name, json.dumps(value) if name == "choice" else value)
    return None


def _of_schema(schema: Any) -> Structured:
    return Structured("json_schema", json.dumps(schema))
