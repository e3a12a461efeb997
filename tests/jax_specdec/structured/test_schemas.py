"""Generated JSON schemas through the loop: a text that is valid, or a refusal that says why.

Useful schemas are made of words that llguidance knows. Wild ones have any words side by side: many
contradict themselves, or have words that are refused.
"""

import functools
import json

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import RequestError, Structured
from jax_specdec.structured.checks import StructureChecks
from jax_specdec.structured.vocabulary import read_vocabulary
from jax_specdec.text import byte_tokens
from tests.support.decoding import random_model, request, run

VOCAB, END = byte_tokens.VOCAB_SIZE, byte_tokens.EOS_ID
# What ends strings, numbers and lists comes as soon as it may.
ENDS = {END: 90, ord('"'): 60, ord("}"): 50, ord("]"): 50, ord(","): 40, ord(":"): 30}
SLOTS, MOST = 6, 400

small = st.integers(-20, 20)
values = st.none() | st.booleans() | small | st.text(max_size=4)
names = st.sampled_from(["a", "b", "naïve", 'q"', "x y"])
leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {}]),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
              small, st.integers(0, 300)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
              st.integers(0, 4), st.integers(0, 9)),
    st.sampled_from(["^[a-c]{2,5}$", "x+y?", "^(foo|bär)$", "\\d{3}"]).map(
        lambda one: {"type": "string", "pattern": one}),
    st.sampled_from(["date", "time", "uuid", "ipv4", "email"]).map(
        lambda one: {"type": "string", "format": one}),
    st.lists(values, min_size=1, max_size=4).map(lambda some: {"enum": some}),
    values.map(lambda one: {"const": one}),
)  # fmt: skip


def around(inner):
    properties = st.dictionaries(names, inner, max_size=3)
    return st.one_of(
        st.builds(lambda items, low, more: {"type": "array", "items": items, "minItems": low,
                                            "maxItems": low + more},
                  inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda known, open_: {"type": "object", "properties": known,
                                        "required": [*known][:2], "additionalProperties": open_},
                  properties, st.booleans() | inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        st.builds(lambda known, one: {"allOf": [{"properties": known}, {"type": "object"}, one]},
                  properties, inner),
        inner.map(lambda one: {"type": ["object", "null"], "properties": {"a": one}}),
    )  # fmt: skip


nested = st.recursive(leaves, around, max_leaves=6)
useful = nested | nested.map(
    lambda one: {"$defs": {"x": one}, "type": "array", "items": {"$ref": "#/$defs/x"},
                 "maxItems": 3})  # fmt: skip
kinds = st.sampled_from(["array", "boolean", "integer", "null", "number", "object", "string"])
counts, numbers, switches = st.integers(0, 9), st.floats(-1e3, 1e3), st.booleans()
schema = kinds.map(lambda kind: {"type": kind})
schemas = st.lists(schema, min_size=1, max_size=3)
named = st.dictionaries(st.text(max_size=3), schema, max_size=3)
words = {
    "type": kinds, "enum": st.lists(values, min_size=1, max_size=4), "const": values,
    "minimum": numbers, "exclusiveMaximum": numbers, "multipleOf": st.sampled_from([1, 5, 0.1]),
    "minLength": counts, "maxLength": counts, "pattern": st.sampled_from(["a|b", "^x", "(?=a)"]),
    "format": st.sampled_from(["date", "uri", "ipv6", "regex", "no such"]), "title": st.text(),
    "items": schema, "minItems": counts, "maxItems": counts, "uniqueItems": switches,
    "contains": schema, "properties": named, "patternProperties": named,
    "additionalProperties": switches, "required": st.lists(names, max_size=2, unique=True),
    "minProperties": counts, "anyOf": schemas, "oneOf": schemas, "allOf": schemas, "not": schema,
    "if": schema, "then": schema, "$ref": st.sampled_from(["#", "#/x", "http://a.b/c"]),
}  # fmt: skip
wild = st.lists(st.sampled_from([*words]), min_size=1, max_size=4, unique=True).flatmap(
    lambda chosen: st.fixed_dictionaries({name: words[name] for name in chosen})
)
vocabulary = functools.cache(lambda: read_vocabulary("", VOCAB))
checks = StructureChecks("", VOCAB)


def asking(number, schema):
    return request(
        f"r{number}", [number + 1, 2, 3, 2, 3], max_tokens=MOST, logit_bias=ENDS,
        stop_token_ids=(END,), structured=Structured("json_schema", json.dumps(schema)),
    )  # fmt: skip


def outcomes(schemas):
    """What becomes of each schema: "refused", "valid" or "cut"; the refusal names a reason."""
    requests, found = [], []
    for number, schema in enumerate(schemas):
        item = asking(number, schema)
        try:
            checks.check(item)
        except RequestError as error:
            prefix, _, why = str(error).partition("the json_schema cannot be served: ")
            assert prefix == f"request {item.id!r}: structured: "
            assert why
            found.append("refused")
        else:
            requests.append((item, schema))
    if not requests:
        return found
    result = run([item for item, _ in requests], "ngram", num_slots=SLOTS, max_length=MOST + 6,
                 model=random_model(VOCAB), vocabulary=vocabulary)  # fmt: skip
    for item, schema in requests:
        ids, last = result.token_ids(item.id), result.records[item.id][-1]
        if last.finish_reason is FinishReason.LENGTH:
            found.append("cut")
            continue
        assert last.finish_reason is FinishReason.STOP_TOKEN
        assert ids.pop() == END
        jsonschema.validate(json.loads(byte_tokens.decode_bytes(ids)), schema)
        found.append("valid")
    return found


def shares(schemas, examples):
    """How many of generated schemas are served, refused and cut at the limit of tokens."""
    every = []

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None,
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @given(st.lists(schemas, min_size=SLOTS, max_size=SLOTS))
    def look(some):
        try:
            for one in some:
                jsonschema.Draft202012Validator.check_schema(one)
        except jsonschema.SchemaError:
            assume(False)
        every.extend(outcomes(some))

    look()
    return {name: every.count(name) for name in ("valid", "refused", "cut")}


@pytest.mark.parametrize(
    ("examples", "least"), [(4, 12), pytest.param(60, 280, marks=pytest.mark.slow)]
)
def test_useful_schemas_are_served(examples, least):
    found = shares(useful, examples)
    assert found["valid"] > least
    assert found["cut"] <= sum(found.values()) / 20


@pytest.mark.slow
def test_wild_schemas_are_served_or_refused():
    found = shares(wild, 60)
    assert found["valid"] > 120
    assert found["refused"] > 120
