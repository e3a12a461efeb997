"""Checks of a structure before anything compiles it: numbers whose grammars would be huge.

The grammar of the multiples of n has a state for each remainder: time and memory of a compilation
grow with n, and of several that must divide one number with their least common multiple. Decimal
places cost nothing, and factors of 2 and 5 little, as the last digits tell of them.
"""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

MOST_DIVISOR = 1 << 14
DEEPEST = 64  # schemas in schemas that are looked at; the library refuses deeper ones
MOST_NODES = 100_000  # that are looked at; a text of 65,536 characters has fewer
_BRANCHES = ("anyOf", "oneOf")  # one of them, together with what stands beside them
_ITSELF = ("allOf",)  # all of them, together with it


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema with a `multipleOf` that is too large, alone or with its siblings.

    Raises:
      ValueError: names the number and the limit.
    """
    for node in _nodes(schema):
        _divisor(node, schema, 0)


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in a schema, in no order."""
    waiting, count = [schema], 0
    while waiting and count < MOST_NODES:
        value = waiting.pop()
        count += 1
        if isinstance(value, Mapping):
            yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _divisor(node: Any, root: Any, depth: int) -> int:
    """The largest number that what a node describes must be a multiple of, as `_number` counts."""
    if not isinstance(node, Mapping) or depth > DEEPEST:
        return 1
    divisor = _number(node["multipleOf"]) if "multipleOf" in node else 1
    for name in _ITSELF:
        for part in _list(node.get(name)):
            divisor = _together(divisor, _divisor(part, root, depth + 1))
    if isinstance(reference := node.get("$ref"), str):
        divisor = _together(divisor, _divisor(_target(root, reference), root, depth + 1))
    for name in _BRANCHES:
        branches = [_divisor(part, root, depth + 1) for part in _list(node.get(name))]
        divisor = max((_together(divisor, part) for part in branches), default=divisor)
    return divisor


def _together(first: int, second: int) -> int:
    multiple = math.lcm(first, second)
    if multiple > MOST_DIVISOR:
        raise ValueError(
            f"multipleOf of {first} and {second} together is one of {multiple}, and may be one of "
            f"{MOST_DIVISOR} at most, factors of 2 and 5 not counted: check it in your program"
        )
    return multiple


def _number(value: Any) -> int:
    """A `multipleOf` without its decimal places, and its factors of 2 and 5."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 1  # the library refuses it
    digits = Decimal(str(value)).normalize().as_tuple().digits
    number = int("".join(map(str, digits[:40])))
    for factor in (2, 5):
        while number and number % factor == 0:
            number //= factor
    if number > MOST_DIVISOR:
        raise ValueError(
            f"multipleOf = {value} may be {MOST_DIVISOR} at most, decimal places and factors of 2 "
            "and 5 not counted: check it in your program"
        )
    return max(number, 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(root: Any, reference: str) -> Any:
    """The schema that a reference within the schema leads to; None for another one."""
    if not reference.startswith("#"):
        return None
    value = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
