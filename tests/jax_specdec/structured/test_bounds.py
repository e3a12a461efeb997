"""Numbers whose grammars would be huge are refused before anything compiles them."""

import json

import pytest

from jax_specdec.requests import RequestError, Structured
from jax_specdec.structured.bounds import MOST_DIVISOR, check_schema
from jax_specdec.structured.grammar import grammar_of


def multiple(number, **more):
    return {"type": "number", "multipleOf": number} | more


def alone(*numbers):
    return {"properties": {f"k{n}": multiple(n) for n in numbers}}


@pytest.mark.parametrize(
    "schema",
    [
        multiple(1), multiple(0.01), multiple(1e-7), multiple(10**30), multiple(65_536),
        multiple(1.5), multiple(86_400 * 1000), multiple(2**40), multiple(3 * 2**20),
        alone(16381, 16369, 16363), alone(7, 11, 13, 10007),
        {"allOf": [multiple(100), multiple(250)]},
        {"anyOf": [multiple(16381), multiple(16369)]},  # one or the other
        multiple("x"), multiple(True), multiple(10**400), multiple(0), multiple(-3), True, [], 3,
        None, {"$ref": "#"}, {"$ref": "https://example.com/x"}, {"$ref": "#/none/at/all"},
        {"const": {"multipleOf": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_schemas_of_small_numbers_pass(schema):
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (multiple(499_979), "multipleOf = 499979 may be 16384 at most"),
        (multiple(99_999_989), "multipleOf = 99999989 may be"),
        (multiple(0.499979), "multipleOf = 0.499979 may be"),
        (multiple(499_979 * 10**20), "may be"),
        (multiple(-499_979), "may be"),
        (multiple(1e300 / 3), "may be"),
        ({"items": [{"properties": {"a": multiple(70_001)}}]}, "70001 may be"),
        ({"$defs": {"x": multiple(70_001)}}, "70001 may be"),
        ({"allOf": [multiple(1009), multiple(1013)]}, "1009 and 1013 together is one of 1022117"),
        ({"allOf": [multiple(101), {"allOf": [multiple(103), multiple(107)]}]}, "together"),
        (multiple(1009, allOf=[multiple(1013)]), "together"),
        (multiple(1009, anyOf=[{}, multiple(1013)]), "together"),
        (multiple(1009, oneOf=[multiple(1013)]), "together"),
        ({"$defs": {"x": multiple(1009)}, "$ref": "#/$defs/x", "multipleOf": 1013}, "together"),
        ({"$defs": {"a/b": multiple(1009)}, "allOf": [{"$ref": "#/$defs/a~1b"}, multiple(1013)]},
         "together"),
        ({"not": {"a": [[[multiple(70_001)]]]}}, "70001 may be"),
    ],
    ids=str,
)  # fmt: skip
def test_large_ones_are_refused_alone_and_together(schema, said):
    with pytest.raises(ValueError, match=said):
        check_schema(schema)
    with pytest.raises(RequestError, match=f"the json_schema cannot be served: .*{said}"):
        grammar_of(Structured("json_schema", json.dumps(schema)))


def test_schemas_in_grammars_count():
    call = f'start: a %json {json.dumps(multiple(499_979))}\na: "x"'
    with pytest.raises(RequestError, match=r"the grammar cannot be served: .*499979 may be"):
        grammar_of(Structured("grammar", call))
    grammar_of(Structured("grammar", call.replace("499979", str(MOST_DIVISOR))))


def test_deep_and_circular_schemas_end():
    deep = multiple(3)
    for _ in range(500):
        deep = {"allOf": [deep]}
    check_schema(deep)
    check_schema({"allOf": [{"$ref": "#"}, {"$ref": "#/allOf/0"}], "multipleOf": 7})
    check_schema({"anyOf": [{"$ref": "#"}] * 2})  # in time, whatever number of ways there are
    ways = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(200)}
    check_schema({"$defs": ways | {"d200": multiple(7)}})
    with pytest.raises(ValueError, match="1009 and 1013 together"):
        check_schema({"$defs": ways | {"d0": {"allOf": [multiple(1009), {"$ref": "#/$defs/d1"}]},
                                       "d200": multiple(1013)}})  # fmt: skip
