"""Shapes and dtypes that annotations state, checked whenever a test calls what states them.

`install` puts jaxtyping's import hook on every module that imports jaxtyping. A user's process has
no hook: there the annotations are documentation, and the doors' own checks refuse.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
import re
import types
from typing import Annotated, Union, get_args, get_origin, get_type_hints

import jaxtyping
from beartype.door import is_bearable
from beartype.vale import Is
from jaxtyping import TypeCheckError
from jaxtyping._storage import pop_shape_memo, push_shape_memo

from tests.support.paths import ROOT

# What annotates shapes itself, or by names for them.
HOOKED = re.compile(r"^from (jaxtyping import|__future__ import annotations)", re.MULTILINE)


def install(*packages):
    """Check the shapes of these packages' functions from now on; before they are imported."""
    jaxtyping.jaxtyped = lambda typechecker: checked  # what the hook puts on each function
    return jaxtyping.install_import_hook(annotated_modules(packages), None)


def annotated_modules(packages):
    """The modules that annotate shapes. To hook the others would cost time and find nothing."""
    paths = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(paths)
        if HOOKED.search(path.read_text())
    ]


def checked(function):
    """The function, which checks those parameters and results that state shapes.

    Carriers (NamedTuples and dataclasses with shapes) are looked into. Their letters are those of
    the function: R of a `TopkLogprobs` that is returned is R of the `token_ids` that were given.

    The hook's own decorator makes two checking functions of each function, of a closure whenever
    it is made, and calls both: tracing would take up to a tenth longer.
    """
    # jax rebuilds a dataclass that is a pytree with leaves of any kind: shapes, specs, markers.
    if inspect.isclass(function) or function.__name__ == "__init__":
        return function
    code = function.__code__
    key = function.__module__, code, *function.__annotations__.values()
    if key not in _STATED:
        _STATED[key] = stated_shapes(function)
    if not (stated := _STATED[key]):
        return function
    names = code.co_varnames[: code.co_argcount]
    by_name = {"return", *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    assert stated.keys() <= by_name, f"shapes of *args are not checked: {function.__qualname__}"

    @functools.wraps(function)
    def checking(*args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        push_shape_memo(given)
        try:
            refuse_others(function, given, stated)
            found = function(*args, **kwargs)
            refuse_others(function, {"return": found}, stated)
            return found
        finally:
            pop_shape_memo()

    return checking


_STATED = {}  # by a function's module and code, as closures are made again and again


def stated_shapes(function):
    """The hints of parameters and of "return" that state shapes, in their order."""
    found = {}
    for name, hint in function.__annotations__.items():
        with contextlib.suppress(NameError):  # one that type checkers alone take
            of = with_shapes(eval(hint, function.__globals__) if isinstance(hint, str) else hint)
            found |= {} if of is None else {name: of}
    return found


def refuse_others(function, values, stated):
    for name, hint in stated.items():
        if name in values:
            what = "the return value" if name == "return" else f"the parameter '{name}'"
            try:
                if not is_bearable(values[name], hint):
                    raise TypeError(f"{values[name]} is not {hint}")
            except TypeError as error:  # a carrier's says which field
                raise TypeCheckError(f"{what} of {function.__qualname__}: {error}") from error


@functools.cache
def with_shapes(hint):
    """The hint with its carriers looked into; None if it states no shape.

    `Annotated[BatchOptions, "B = 1"]` is not looked into: its letters are not the function's.
    """
    if get_origin(hint) is Annotated:
        return None
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return hint
    if fields := shaped_fields(hint):

        def has_its_shapes(carrier):  # a lambda's source beartype would look up in its file
            return fits(carrier, fields)

        return Annotated[hint, Is[has_its_shapes]]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is list or (origin is tuple and ... in parts):
        item = with_shapes(parts[0])

        def all_have_their_shapes(items):  # beartype itself looks at one item, taken at random
            return all(is_bearable(x, item) for x in items)

        return item and Annotated[hint, Is[all_have_their_shapes]]
    if origin in (Union, types.UnionType, tuple):
        found = [with_shapes(part) for part in parts]
        whole = tuple(new or old for new, old in zip(found, parts, strict=True))
        if any(part is not None for part in found):
            return tuple[whole] if origin is tuple else functools.reduce(operator.or_, whole)
    return None


def shaped_fields(hint):
    """A carrier's fields that state shapes, by name; empty for anything else."""
    if not (hasattr(hint, "_fields") or (dataclasses.is_dataclass(hint) and inspect.isclass(hint))):
        return {}
    hints = get_type_hints(hint, include_extras=True)
    fields = {name: with_shapes(of) for name, of in hints.items()}
    return {name: of for name, of in fields.items() if of is not None}


def fits(carrier, fields):
    """Whether each field has its shape and dtype, with the letters bound so far."""
    for name, hint in fields.items():
        value = getattr(carrier, name)
        if not is_bearable(value, hint):
            found = getattr(value, "dtype", type(value)), getattr(value, "shape", "")
            raise TypeError(f"{type(carrier).__name__}.{name} is {found}, not {hint}")
    return True


def as_users_run(function):
    """The function without the hook: what it refuses itself, with which words."""
    return inspect.unwrap(function)
