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
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import jaxtyping
from beartype import beartype
from beartype.door import is_bearable
from beartype.vale import Is

from tests.support.paths import ROOT

# What annotates shapes itself, or by names for them.
HOOKED = re.compile(r"^from (jaxtyping import|__future__ import annotations)", re.MULTILINE)


def install(*packages):
    """Check the shapes of these packages' functions from now on; before they are imported."""
    return jaxtyping.install_import_hook(
        annotated_modules(packages), "tests.support.shape_checks.checked"
    )


def annotated_modules(packages):
    """The modules that annotate shapes. To hook the others would cost time and find nothing."""
    paths = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(paths)
        if HOOKED.search(path.read_text())
    ]


def checked(function):
    """beartype of those parameters and results that state shapes; jaxtyping calls it.

    Carriers (NamedTuples and dataclasses with shapes) are looked into. Their letters are those of
    the function: R of a `TopkLogprobs` that is returned is R of the `token_ids` that were given.
    """
    named = inspect.get_annotations(function, eval_str=True)
    hints = {name: with_shapes(hint) for name, hint in named.items()}
    # jax rebuilds a dataclass that is a pytree with leaves of any kind: shapes, specs, markers.
    if function.__name__ == "__init__" or all(hint is None for hint in hints.values()):
        return function
    function.__annotations__ = {name: hint or Any for name, hint in hints.items()}
    return beartype(function)


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
    with contextlib.suppress(NameError):  # a name that exists for type checkers alone
        hints = get_type_hints(hint, include_extras=True)
        fields = {name: with_shapes(of) for name, of in hints.items()}
        return {name: of for name, of in fields.items() if of is not None}
    return {}


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
