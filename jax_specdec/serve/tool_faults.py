"""Faults in the schema of a function, in words for who wrote it.

The engine of grammars compiles all functions in one grammar, and its errors show that grammar's
text. The line that they name tells the function, and the reason is looked for in its schema.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_specdec.serve.tool_schemas import NAMED, inner_schemas

_FAULT = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*)")
_EXCERPT = re.compile(r" \d+ \| ")  # begins what an error shows of the grammar
_SHOWN = 200  # characters of a reason
_LACKS = ("Unimplemented keys", "Unknown format", "oneOf", "not supported")
# Words whose values a reason shows, and what else such a reason has.
_SHOWN_VALUES = {
    "format": "Unknown format",
    "type": "Invalid type",
    "pattern": "regex",
    "$ref": "'",
}


def fault(functions: Sequence[Mapping[str, Any]], first_line: int, message: str) -> str:
    """The function, the property and the word that an error is about.

    Args:
      functions: that are offered.
      first_line: of the grammar, which has the first one; each has a line.
      message: of the engine; one of another kind is returned as it is.
    """
    match = _FAULT.search(message)
    at = int(match[1]) - first_line if match else -1
    if match is None or not 0 <= at < len(functions):
        return message
    reason = _EXCERPT.split(match[2])[0].strip()[:_SHOWN]
    function = functions[at]
    where = f"the function {function['name']!r}"
    schema = function.get("parameters") or {}
    try:
        name, word = next(_places(schema, schema, reason, "", set()), ("", ""))
    except RecursionError:  # a thousand references, each of which names the next
        name, word = "", ""
    if word:
        where += f", property {name.removeprefix('.')!r}" if name else ", its parameters"
        where += f": the word {word!r}"
    way = "correct it, or leave it out"
    if function.get("strict") and any(lack in reason for lack in _LACKS):
        way = "leave it out, or leave out strict, without which calls are not held to it"
    return f"{where} cannot be served ({reason}): {way}"


def _places(
    schema: Any, root: Mapping[str, Any], reason: str, name: str, seen: set[str]
) -> Iterator[tuple[str, str]]:
    """Where a schema has what a reason names: names of properties, and words.

    Args:
      root: has the definitions.
      name: of the property that the schema is of.
      seen: definitions that were looked at.
    """
    if not isinstance(schema, Mapping):
        return
    for word, value in schema.items():
        if _is_meant(word, value, reason):
            yield name, word
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        seen.add(reference)
        yield from _places(_definition(root, reference), root, reason, name, seen)
    for suffix, inner in inner_schemas({
        word: value for word, value in schema.items() if word not in ("$defs", "definitions")
    }):  # fmt: skip
        yield from _places(inner, root, reason, name + suffix, seen)


def _definition(root: Any, reference: str) -> Any:
    value = root
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_meant(word: str, value: Any, reason: str) -> bool:
    """Whether a word of a schema is the one that a reason is about."""
    if reason.startswith("Unimplemented keys: "):
        try:
            return word in json.loads(reason.partition(": ")[2])
        except ValueError:  # cut off
            return json.dumps(word) in reason
    if word == "patternProperties" and isinstance(value, Mapping):
        return any(_is_meant("pattern", pattern, reason) for pattern in value)
    if word in _SHOWN_VALUES and isinstance(value, str):
        shown = " ".join(value.split()).removeprefix("#")
        return _SHOWN_VALUES[word] in reason and shown in reason
    plain = reason.replace("invalid multiple of", "multipleOf")
    return word not in NAMED and re.search(rf"\b{re.escape(word)}\b", plain) is not None
