"""What the doors list."""

import inspect
import types

from tests.support.import_rules import DOORS

NAMES = sorted(set().union(*DOORS.values()))


def names_of(module):
    """What a module lists; without a list, what it defines itself and has no underscore."""
    if hasattr(module, "__all__"):
        return module.__all__
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def public(door):
    """(name, object) of everything that a door lists, and of what modules among it list.

    Raises:
      AttributeError: a list has a name that is not there.
    """
    for name in names_of(door):
        found = getattr(door, name)
        yield f"{door.__name__}.{name}", found
        if isinstance(found, types.ModuleType) and found.__name__ not in NAMES:
            yield from public(found)


def documented(door):
    """What of `public` has a docstring of its own: modules, classes and functions."""
    kinds = (types.ModuleType, type, types.FunctionType)
    return {name: found for name, found in public(door) if isinstance(inspect.unwrap(found), kinds)}
