"""The JSON schemas of functions' parameters, as the grammars of calls take them.

Programs write these schemas, mostly from classes, and with words that a grammar of texts cannot
keep (`uniqueItems`, `not`, most formats). A function without `strict` is served all the same: such
a word is left out of its grammar. And a schema that lists properties means these: small models
write others where they may, and clients call functions with them.

Source: https://json-schema.org/draft/2020-12
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax_specdec.structured.grammar import with_white_space

_Schema = Mapping[str, Any]

NO_PARAMETERS: _Schema = {"type": "object", "properties": {}, "additionalProperties": False}
# Words whose values are schemas, lists of schemas, or schemas by names.
_ONE = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems", "additionalItems", "contentSchema",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Words that say something of properties that are not listed, here or in another schema.
_OF_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_JOINED = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref", "not")
# What a grammar has no regular expression for: looking around, going back, edges of words.
_NO_REGEX = re.compile(r"\\[1-9bBkZAzcG]|\(\?(?:[=!>]|<[=!])")
_ESCAPED = re.compile(r"\\\\")


def for_grammar(function: Mapping[str, Any]) -> Any:
    """The schema of a function's parameters, as the grammar of its calls has it."""
    parameters = function.get("parameters") or NO_PARAMETERS
    schema = with_white_space(_closed(parameters, _open_names(parameters)))
    if function.get("strict"):
        return schema
    schema = _without_strange_patterns(schema)
    return schema | {"x-guidance": {"lenient": True} | schema["x-guidance"]}


def _closed(schema: Any, open_names: frozenset[str], *, joined: bool = False) -> Any:
    """The schema, in which every object that lists its properties has no others.

    Args:
      open_names: definitions that other schemas add properties to.
      joined: this schema is one of several that hold for one value, each with properties.
    """
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    together = "properties" in schema and any(word in schema for word in _JOINED)
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    for word, value in schema.items():
        if word in _LISTS and isinstance(value, list):
            also = joined or together or (word == "allOf" and several)
            inside = also and word != "prefixItems" and word != "items"
            closed[word] = [_closed(inner, open_names, joined=inside) for inner in value]
        elif word in NAMED and isinstance(value, Mapping):
            is_open = open_names if word in ("$defs", "definitions") else frozenset()
            also = word == "dependentSchemas"
            closed[word] = {
                name: _closed(inner, open_names, joined=also or name in is_open)
                for name, inner in value.items()
            }
        elif word in ("then", "else"):
            closed[word] = _closed(value, open_names, joined=True)
        elif word in _ONE and word not in ("not", "if"):
            closed[word] = _closed(value, open_names)
    if not (joined or together or any(word in schema for word in _OF_OTHERS)) and _lists(schema):
        closed["additionalProperties"] = False
    return closed


def _lists(schema: _Schema) -> bool:
    """Whether a schema lists properties, and all that it requires among them."""
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in names for name in required)


def _open_names(schema: Any) -> frozenset[str]:
    """Names of definitions that stand beside other schemas of the same value."""
    beside: list[Any] = []
    for outer in _schemas(schema):
        together = "properties" in outer and any(word in outer for word in _JOINED)
        if together:
            beside.append(outer)
        for word in ("allOf", "anyOf", "oneOf"):
            branches = outer.get(word)
            if isinstance(branches, list) and (together or (word == "allOf" and len(branches) > 1)):
                beside += branches
    references = [branch.get("$ref") for branch in beside if isinstance(branch, Mapping)]
    return frozenset(name.rpartition("/")[2] for name in references if isinstance(name, str))


def _schemas(schema: Any) -> Iterator[_Schema]:
    """A schema and all that are in it."""
    if isinstance(schema, Mapping):
        yield schema
        for _, inner in inner_schemas(schema):
            yield from _schemas(inner)


def inner_schemas(schema: _Schema) -> Iterator[tuple[str, Any]]:
    """The schemas right in a schema, with what each adds to the name of a property."""
    for word, value in schema.items():
        if word in NAMED and isinstance(value, Mapping):
            for name, inner in value.items():
                yield (f".{name}" if word == "properties" else ""), inner
        elif word in _LISTS and isinstance(value, list):
            for inner in value:
                yield ("[]" if word in ("items", "prefixItems") else ""), inner
        elif word in _ONE:
            yield ("[]" if "tems" in word else ""), value


def _without_strange_patterns(schema: Any) -> Any:
    """The schema without regular expressions that no grammar has."""
    if isinstance(schema, list):
        return [_without_strange_patterns(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {}
    for word, value in schema.items():
        if word in ("enum", "const", "default", "examples", "x-guidance"):
            plain[word] = value
        elif word == "pattern" and isinstance(value, str):
            if not _is_strange(value):
                plain[word] = value
        elif word in NAMED and isinstance(value, Mapping):
            plain[word] = {
                name: _without_strange_patterns(inner)
                for name, inner in value.items()
                if word != "patternProperties" or not _is_strange(name)
            }
        else:
            plain[word] = _without_strange_patterns(value)
    return plain


def _is_strange(pattern: str) -> bool:
    return _NO_REGEX.search(_ESCAPED.sub("", pattern)) is not None
