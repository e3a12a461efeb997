"""What a body asks its text to be, as `SamplingParams` has it."""

import json
from collections.abc import Mapping
from typing import Any

from jax_specdec.requests import Structured
from jax_specdec.serve import tools
from jax_specdec.serve.errors import ApiError

FIELDS = ("tools", "structured_outputs", "response_format")


def structure_of(given: Mapping[str, Any]) -> Structured | None:
    """The structure of a body's text; None: anything.

    Raises:
      ApiError: it asks for two at once, for one that is not complete, or to go on after its end.
    """
    functions, required = tools.offered(given)
    asked = {
        "response_format": _of_format(given.get("response_format", {"type": "text"})),
        "structured_outputs": _of_outputs(given.get("structured_outputs", {})),
        "tools": tools.grammar(functions, required=required) if functions else None,
    }
    named = {name: one for name, one in asked.items() if one is not None}
    if not named:
        return None
    if len(named) > 1:
        raise ApiError(
            400, f"{' and '.join(named)} each say what the text is: give one", param=[*named][1]
        )
    ((name, found),) = named.items()
    if given["ignore_eos"]:
        raise ApiError(
            400, f"ignore_eos with {name}: nothing comes after its end; leave one out", param=name
        )
    return found


def _of_format(given: Mapping[str, Any]) -> Structured | None:
    if given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return _of_schema({"type": "object"})
    if given.get("json_schema") is None:
        raise ApiError(
            400,
            'response_format of type json_schema needs json_schema: {"name": ..., "schema": ...}',
            param="response_format",
        )
    return _of_schema(given["json_schema"].get("schema") or {})


def _of_outputs(given: Mapping[str, Any]) -> Structured | None:
    named = {name: value for name, value in given.items() if value not in (None, False)}
    if len(named) > 1:
        raise ApiError(
            400,
            f"structured_outputs has {' and '.join(named)}: give one of them",
            param="structured_outputs",
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
