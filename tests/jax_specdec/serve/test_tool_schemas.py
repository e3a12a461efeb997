"""Schemas of functions: what their calls may have, and what is wrong in one."""

import json

import numpy as np
import pytest

from jax_specdec.requests import RequestError
from jax_specdec.serve import tools
from jax_specdec.serve.tool_faults import fault
from jax_specdec.structured.matcher import Matcher
from jax_specdec.structured.vocabulary import read_vocabulary
from jax_specdec.text import byte_tokens

VOCABULARY = read_vocabulary("", byte_tokens.VOCAB_SIZE)
END = (byte_tokens.EOS_ID,)


def matcher_of(functions, *, required=True):
    return Matcher(VOCABULARY, tools.grammar(functions, required=required), END)


def may_call(parameters, arguments, **more):
    """Whether a call with these arguments is one of the grammar."""
    named = {"name": "f", "arguments": arguments}
    text = f"<tool_call>\n{json.dumps(named)}\n</tool_call>"
    ids = byte_tokens.encode(text).tolist()
    masks = np.zeros((len(ids) + 1, VOCABULARY.num_words), np.int32)
    matcher = matcher_of([{"name": "f", "parameters": parameters, **more}])
    return matcher.fill(masks, ids) == len(ids)


def of(**properties):
    return {"type": "object", "properties": properties}


NUMBER = {"type": "integer"}
TEXT = {"type": "string"}

# A schema that is not served with strict: the property and the word, and arguments that are served.
LACKING = {
    "binary": (of(b=NUMBER, a={"type": "string", "format": "binary"}), "a", "format", {"a": "x"}),
    "if": (of(a={"if": NUMBER, "then": {"minimum": 1}}), "a", "if", {"a": 1}),
    "one of two": (of(a={"oneOf": [NUMBER, {"type": "number"}]}), "a", "oneOf", {"a": 1}),
    "in a list": (of(a={"type": "array", "items": of(b={"not": {}})}), "a[].b", "not",
                  {"a": [{"b": 1}]}),
    "referred to": ({**of(a={"type": "array", "items": {"$ref": "#/$defs/S"}}),
                     "$defs": {"S": {"type": "array", "uniqueItems": True}}},
                    "a[]", "uniqueItems", {"a": [[1, 1]]}),
    "one that may be null": (of(a={"anyOf": [{"type": "string", "format": "path"},
                                             {"type": "null"}]}), "a", "format", {"a": "x"}),
    "ahead": (of(a={"type": "string", "pattern": "^(?=x)x$"}), "a", "pattern", {"a": "y"}),
    "back": (of(a={"type": "string", "pattern": r"(a)\1"}), "a", "pattern", {"a": "y"}),
    "a word": (of(a={"type": "string", "pattern": r"\bx"}), "a", "pattern", {"a": "y"}),
    "names by pattern": (of(a={"type": "object", "patternProperties": {"(?!x)": NUMBER}}),
                         "a", "patternProperties", {"a": {"y": "s"}}),
    "root": ({**of(a=NUMBER), "dependentRequired": {"a": ["b"]}}, "", "dependentRequired",
             {"a": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKING)
def test_words_that_a_grammar_lacks_are_left_out_without_strict(name):
    parameters, _, _, arguments = LACKING[name]
    assert may_call(parameters, arguments)
    assert may_call(parameters, arguments, strict=False)


@pytest.mark.parametrize("name", LACKING)
@pytest.mark.parametrize("required", [True, False])
def test_with_strict_the_error_names_function_property_and_word(name, required):
    """Whichever of several functions it is, and without the grammar's text."""
    parameters, place, word, _ = LACKING[name]
    first = {"name": "first", "parameters": of(a={"uniqueItems": True})}
    functions = [first, {"name": "f", "strict": True, "parameters": parameters}]
    with pytest.raises(RequestError) as raised:
        matcher_of(functions, required=required)
    said = fault(functions, 2 if required else 4, str(raised.value))
    where = f", property {place!r}: " if place else ", its parameters: "
    assert said.startswith(f"the function 'f'{where}the word {word!r} cannot be served (")
    assert said.endswith(
        "leave it out, or leave out strict, without which calls are not held to it"
    )
    assert "call_" not in said
    assert "first" not in said


@pytest.mark.parametrize(
    ("schema", "place", "word"),
    [
        ({"type": "any"}, "a", "type"),
        ({"type": "number", "multipleOf": 0}, "a", "multipleOf"),
        ({"type": "array", "items": {"$ref": "#/definitions/B"}}, "a[]", "$ref"),
    ],
)
def test_a_schema_that_is_wrong_is_refused_without_strict_too(schema, place, word):
    functions = [{"name": "f", "parameters": {**of(a=schema), "required": ["a"]}}]
    with pytest.raises(RequestError) as raised:
        matcher_of(functions)
    said = fault(functions, 2, str(raised.value))
    assert said.startswith(f"the function 'f', property {place!r}: the word {word!r} cannot")
    assert said.endswith("correct it, or leave it out")


def test_messages_of_other_kinds_stay():
    for text in ("no token may come next", "at 9(1): failed to compile JSON schema: x", ""):
        assert fault([{"name": "f"}], 2, text) == text


# Properties that are not listed ----------------------------------------------------------------

B = {"a": 1, "b": 2}
CLOSED = {
    "plain": (of(a=NUMBER), B),
    "no parameters": (None, {"x": 1}),
    "in a list": (of(c={"type": "array", "items": of(a=NUMBER)}), {"c": [B]}),
    "one of several": (of(c={"anyOf": [of(a=NUMBER), {"type": "null"}]}), {"c": B}),
    "alone in allOf": ({**of(c={"allOf": [{"$ref": "#/$defs/A"}]}), "$defs": {"A": of(a=NUMBER)}},
                       {"c": B}),
    "a value": (of(c={"type": "object", "additionalProperties": of(a=NUMBER)}), {"c": {"x": B}}),
}  # fmt: skip
OPEN = {
    "of a type": ({**of(a=NUMBER), "additionalProperties": NUMBER}, B),
    "a class of another": ({"allOf": [{"$ref": "#/$defs/A"}, of(b=NUMBER)],
                            "$defs": {"A": of(a=NUMBER)}}, B),
    "beside a reference": ({**of(b=NUMBER), "$ref": "#/$defs/A", "$defs": {"A": of(a=NUMBER)}},
                           {"b": 2, "a": 1}),
    "beside others": ({**of(a=NUMBER), "anyOf": [of(b=NUMBER), of(c=NUMBER)]}, B),
    "required, not listed": ({**of(a=NUMBER), "required": ["b"]}, B),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("strict", [False, True])
def test_objects_that_list_properties_have_no_others(name, strict):
    parameters, wrong = CLOSED[name]
    assert not may_call(parameters, wrong, strict=strict)
    right = json.loads(json.dumps(wrong).replace(', "b": 2', "").replace('"x": 1', ""))
    assert may_call(parameters, right, strict=strict)


@pytest.mark.parametrize("name", OPEN)
def test_objects_that_others_add_to_stay_open(name):
    parameters, arguments = OPEN[name]
    assert may_call(parameters, arguments)


@pytest.mark.parametrize("length", [60, 2000])
def test_a_recursive_schema_is_looked_through_once(length):
    """Each definition names the next one twice: 2 ** 60 ways."""
    definitions = {
        f"D{n}": of(a={"$ref": f"#/$defs/D{n + 1}"}, b={"$ref": f"#/$defs/D{n + 1}"})
        for n in range(length)
    }
    last = {f"D{length}": {"type": "any"}}
    parameters = {"$ref": "#/$defs/D0", "$defs": definitions | last}
    said = fault([{"name": "f", "parameters": parameters}], 2,
                 "at 2(9): failed to compile JSON schema: Unknown format: none")  # fmt: skip
    assert said.startswith("the function 'f' cannot be served (Unknown format: none)")
