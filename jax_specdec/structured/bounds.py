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
MOST_NODES = 100_000  # that are looked at; a text of 65,536 characters has fewer
_BRANCHES = ("anyOf", "oneOf")  # one of them, together with what stands beside them
_ITSELF = ("allOf", "$ref")  # all of them, together with it


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema with a `multipleOf` that is too large, alone or with its siblings.

    Raises:
      ValueError: names the number and the limit.
    """
    divisors: dict[int, int] = {}  # by a node's id: many ways may lead to a node
    entered: set[int] = set()
    for start in _nodes(schema):
        path = [start]
        while path:
            node = path[-1]
            if id(node) not in entered:
                entered.add(id(node))
                parts = _parts(node, schema, *_ITSELF, *_BRANCHES)
                path += [part for part in parts if id(part) not in entered]
                continue
            path.pop()
            if id(node) not in divisors:
                divisors[id(node)] = _divisor(node, schema, divisors)


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


def _parts(node: Mapping[str, Any], root: Any, *words: str) -> Iterator[Mapping[str, Any]]:
    """The schemas by these words of a node, which hold for its value too, or may."""
    for word in words:
        value = node.get(word)
        if word == "$ref":
            value = [_target(root, value)] if isinstance(value, str) else []
        if isinstance(value, list):
            yield from (part for part in value if isinstance(part, Mapping))


def _divisor(node: Mapping[str, Any], root: Any, divisors: Mapping[int, int]) -> int:
    """The largest number that what a node describes must be a multiple of, as `_number` counts.

    Args:
      divisors: of its parts, by their ids. One that leads back to the node has none yet, and adds
        nothing: the library refuses it beside other words.
    """
    divisor = _number(node["multipleOf"]) if "multipleOf" in node else 1
    for part in _parts(node, root, *_ITSELF):
        divisor = _together(divisor, divisors.get(id(part), 1))
    for word in _BRANCHES:
        numbers = (divisors.get(id(part), 1) for part in _parts(node, root, word))
        divisor = max((_together(divisor, number) for number in numbers), default=divisor)
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1  # the library refuses it
    if isinstance(value, float) and not math.isfinite(value):
        return 1
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


def _target(root: Any, reference: str) -> Any:
    """The schema that a reference within the schema leads to; None for another one."""
    if not reference.startswith("#"):
        return None
    value = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
