"""Objects of a package put in the place of others for a while, wherever the package holds them."""

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax


@contextmanager
def replaced(package: str, new: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Each object of `new` in the place of the one that it names, until the `with` ends.

    The old object is replaced in every module and class of `package` that holds it under any name,
    also where another module has imported it. At the end, modules that were imported meanwhile
    get the old one too. As jitted functions, yours too, remember what they called when they were
    traced, JAX forgets all compiled programs at both moments: they are compiled again when called.
    Programs that were compiled by hand (`lower(...).compile()`) and names that modules outside of
    the package have imported are out of reach.

    Args:
      package: its name, such as "tunix".
      new: "module:name" or "module:Class.name" of an object of the package, and ours.

    Yields:
      The full names that were replaced, sorted; those that hold ours already are not among them.

    Raises:
      ImportError, AttributeError: something of that name is not there. Nothing was changed.
    """
    pairs = [(object_of(name), ours) for name, ours in new.items()]
    pairs = [(theirs, ours) for theirs, ours in pairs if theirs is not ours]
    names: list[str] = []
    try:
        for theirs, ours in pairs:
            names += _put(package, theirs, ours)
        jax.clear_caches()
        yield tuple(sorted(names))
    finally:
        for theirs, ours in pairs:
            _put(package, ours, theirs)
        jax.clear_caches()


def without_refusal(name: str, message: str) -> Callable[..., Any]:
    """A function made from its source, without the `if` that does nothing but raise this message.

    Args:
      name: "module:name" or "module:Class.name" of the function.
      message: a string that stands in the `raise`.

    Raises:
      AttributeError: there is no such function, or not one such `if` in it.
    """
    function = object_of(name)
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.If)]
    places = [(body, part) for body in bodies for part in body if _refuses(part, message)]
    if len(places) != 1:
        raise AttributeError(f"{name} has {len(places)} refusals of {message!r}: one was expected")
    body, refusal = places[0]
    body.remove(refusal)
    made: dict[str, Any] = {}
    code = compile(tree, inspect.getfile(function), "exec")
    exec(code, inspect.unwrap(function).__globals__, made)
    changed: Callable[..., Any] = made[function.__name__]
    return changed


def _refuses(node: ast.stmt, message: str) -> bool:
    """Whether it is an `if` that does nothing but raise the message."""
    if not isinstance(node, ast.If) or node.orelse or len(node.body) != 1:
        return False
    (raised,) = node.body
    return isinstance(raised, ast.Raise) and any(
        isinstance(part, ast.Constant) and part.value == message for part in ast.walk(raised)
    )


def object_of(name: str) -> Any:
    """The object of the full name "module:name" or "module:Class.name"."""
    module, _, path = name.partition(":")
    holder: Any = importlib.import_module(module)
    for part in path.split("."):
        if part not in vars(holder):
            raise AttributeError(f"{module} has no {path}: this is another {name.split('.')[0]}")
        holder = vars(holder)[part]
    return holder


def _put(package: str, old: Any, new: Any) -> list[str]:
    """Put `new` wherever a module or class of the package holds `old`; the full names of these."""
    names = []
    for holder, path in _holders(package):
        for name in [name for name, value in vars(holder).items() if value is old]:
            setattr(holder, name, new)
            names.append(f"{path}.{name}")
    return names


def _holders(package: str) -> Iterator[tuple[Any, str]]:
    """The package's loaded modules, and the classes that are defined in them, with their names."""
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and f"{path}.".startswith(f"{package}."):
            yield module, path
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == path:
                    yield value, f"{path}.{name}"
