"""`help` says what each field of a public named tuple is."""

import importlib
import inspect
import pydoc
import typing
from types import FunctionType
from typing import NamedTuple

import pytest

from ipc.field_docs import with_field_docs
from pallas_kernels.contract import field_docs as of_kernels

ALIAS = "Alias for field number"
DOORS = (
    "jax_specdec.engine", "jax_specdec.export", "jax_specdec.device", "jax_specdec.device.drafting",
    "jax_specdec.device.model", "jax_specdec.adapters", "pallas_kernels", "pallas_kernels.sampling",
    "ipc", "ipc.wire",
)  # fmt: skip


def is_named_tuple(value):
    return isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")


def types_in(annotation):
    """The classes that an annotation is made of."""
    inside = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    if inside:
        return set().union(*map(types_in, inside))
    return {annotation} if isinstance(annotation, type) else set()


def named_tuples(value):
    """Those that a door's value is, returns, or has as fields, and theirs in turn."""
    seen, waiting = set(), [value]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, type | FunctionType) or value in seen:
            continue
        seen.add(value)
        try:
            hints = typing.get_type_hints(value)
        except (NameError, TypeError):  # names that only a type checker has
            hints = {}
        if inspect.isfunction(value):
            hints = {"return": hints.get("return")}
        for hint in hints.values():
            waiting += [cls for cls in types_in(hint) if is_named_tuple(cls)]
    return {cls for cls in seen if is_named_tuple(cls)}


def public_named_tuples(door):
    module = importlib.import_module(door)
    names = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
    values = [getattr(module, name) for name in names]
    return {cls for value in values for cls in named_tuples(value) if cls.__name__[0] != "_"}


@pytest.mark.parametrize("door", DOORS)
def test_help_explains_every_field_of_a_door(door):
    unexplained = {
        f"{cls.__module__}.{cls.__name__}.{name}"
        for cls in public_named_tuples(door)
        for name in cls._fields
        if ALIAS in getattr(cls, name).__doc__
    }
    assert unexplained == set()


def test_what_a_door_returns_is_looked_at():
    """The control: of a function's result, and of a field's field."""
    assert {"Greedy", "LinearKeptLogprobs", "LogprobsTensors"} <= {
        cls.__name__ for cls in public_named_tuples("pallas_kernels")
    }
    assert "Changes" in {cls.__name__ for cls in public_named_tuples("pallas_kernels.sampling")}


class Pair(NamedTuple):
    """Two numbers and a word.

    Attributes:
      first, second: numbers,
        in this order: a pair.
      word: a text.

    More: of the pair.
    """

    first: int
    second: int
    word: str = "a"
    unsaid: int = 0


def test_fields_get_their_texts_from_the_docstring():
    cls = with_field_docs(Pair)
    texts = [getattr(cls, name).__doc__ for name in cls._fields]
    both = "numbers, in this order: a pair."
    assert texts == [both, both, "a text.", "Alias for field number 3"]
    assert f" first\n |      {both}" in pydoc.plain(pydoc.render_doc(cls))
    assert cls(1, 2) == (1, 2, "a", 0)


def test_both_packages_have_the_same_function():
    assert inspect.getsource(with_field_docs) == inspect.getsource(of_kernels.with_field_docs)
    assert of_kernels._ENTRY.pattern == with_field_docs.__globals__["_ENTRY"].pattern
