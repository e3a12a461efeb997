"""Values of JSON against the schemas of `fields.py`, with errors for a person.

Only the words of JSON Schema that those schemas use are known. A list of token ids may be long: its
items are looked at in one go.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax_specdec.serve.errors import MAX_SHOWN, ApiError, shown, unfit
from jax_specdec.serve.fields import NEUTRAL, Schema


def check_body(body: Any, fields: Mapping[str, Schema], required: str) -> dict[str, Any]:
    """The fields of a body that are given, checked, and the defaults of the others that have one.

    Raises:
      ApiError: says which field is wrong and what it may be.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL:
            if not any(_same(value, one) for one in NEUTRAL[name]):
                takes = " or ".join(map(json.dumps, NEUTRAL[name]))
                raise unfit(
                    name,
                    f"{name} = {shown(value)} is not served yet: leave it out (or give {takes})",
                    code="unsupported_value",
                )
        elif name not in fields:
            raise _unknown(name, fields)
        else:
            check(name, value, fields[name])
    if required not in given:
        raise unfit(required, f"{required} is missing")
    defaults = {name: one["default"] for name, one in fields.items() if "default" in one}
    return defaults | {name: value for name, value in given.items() if name not in NEUTRAL}


def check(name: str, value: Any, schema: Schema) -> None:
    """Check a field's value.

    Raises:
      ApiError: as `check_body`.
    """
    if (wrong := _wrong(value, schema)) is not None:
        raise unfit(name, f"{name} = {shown(value)}: {wrong}")


def _unknown(name: str, fields: Iterable[str]) -> ApiError:
    known = [*fields, *NEUTRAL]
    name = name[:MAX_SHOWN]  # to compare a long one takes long
    near = difflib.get_close_matches(name, known, 1)
    way = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return unfit(name, f"{name!r} is not served; {way}", code="unknown_parameter")


def _wrong(value: Any, schema: Schema) -> str | None:
    """What is wrong with a value, or None."""
    if "anyOf" in schema:
        return _none_of(value, schema["anyOf"])
    if "enum" in schema:
        choices = schema["enum"]
        if any(_same(value, one) for one in choices):
            return None
        return f"must be one of {', '.join(map(str, choices))}"
    kind = schema["type"]
    is_one, word, more = _TYPES[kind]
    if not isinstance(value, is_one) or (isinstance(value, bool) and kind != "boolean"):
        return word
    return more(value, schema)


def _none_of(value: Any, schemas: list[Schema]) -> str | None:
    """What is wrong by the schema that fits best: the last one that allows the value's type."""
    found = [_wrong(value, each) for each in schemas]
    if None in found:
        return None
    by_type = {word for _, word, _ in _TYPES.values()}
    told = [wrong for wrong in found if wrong and wrong not in by_type]
    return told[-1] if told else " or ".join(dict.fromkeys(filter(None, found)))


def _wrong_number(value: float, schema: Schema) -> str | None:
    high = schema["maximum"]
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"]
        return None if low < value <= high else f"must be above {low} and at most {high}"
    low = schema["minimum"]
    if low <= value <= high:  # which neither NaN nor an infinity is
        return None
    return f"must be from {low} to {high}"


def _wrong_string(value: str, schema: Schema) -> str | None:
    if len(value) < schema.get("minLength", 0):
        return "must not be empty"
    if len(value) > (most := schema.get("maxLength", math.inf)):
        return f"has {len(value)} characters and may have {most}"
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        return f"must match {schema['pattern']}"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair: write the character itself"
    return None


def _wrong_array(value: list[Any], schema: Schema) -> str | None:
    low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not low <= len(value) <= high:
        limits = f"at least {low}" if high == math.inf else f"{low} to {high}"
        return f"has {len(value)} items and must have {limits}"
    items = schema["items"]
    if items.get("type") == "integer":
        if not all(type(item) is int for item in value):
            return "must hold whole numbers"
        if value and not items["minimum"] <= min(value) <= max(value) <= items["maximum"]:
            return f"must hold whole numbers from {items['minimum']} to {items['maximum']}"
        return None
    for number, item in enumerate(value):
        if (wrong := _wrong(item, items)) is not None:
            return f"item {number} {wrong}"
    return None


def _wrong_object(value: dict[str, Any], schema: Schema) -> str | None:
    if "properties" not in schema:
        return _wrong_mapping(value, schema) if "propertyNames" in schema else None
    known, needed = schema["properties"], schema.get("required", ())
    for name, one in value.items():
        if name not in known:
            return f"{name[:MAX_SHOWN]!r} is not served; known are {', '.join(known)}"
        if one is None and name not in needed:
            continue
        if (wrong := _wrong(one, known[name])) is not None:
            return f"{name} {wrong}"
    missing = [name for name in needed if name not in value]
    return f"{missing[0]} is missing" if missing else None


def _wrong_mapping(value: dict[str, Any], schema: Schema) -> str | None:
    """Of an object whose names are values too."""
    if len(value) > schema["maxProperties"]:
        return f"has {len(value)} entries and may have {schema['maxProperties']}"
    for name, one in value.items():
        if not re.fullmatch(schema["propertyNames"]["pattern"], name):
            return f"{name[:MAX_SHOWN]!r} is no token id"
        if (wrong := _wrong(one, schema["additionalProperties"])) is not None:
            return f"the number of token {name} {wrong}"
    return None


# What a value of each type is in Python, and in an error; what else its schema may forbid.
_TYPES: dict[str, tuple[type | tuple[type, ...], str, Callable[[Any, Schema], str | None]]] = {
    "integer": (int, "must be a whole number", _wrong_number),
    "number": ((int, float), "must be a number", _wrong_number),
    "boolean": (bool, "must be true or false", lambda value, schema: None),
    "string": (str, "must be a string", _wrong_string),
    "array": (list, "must be a list", _wrong_array),
    "object": (dict, "must be an object", _wrong_object),
}


def _same(value: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
