"""A door's call as one program, kept for equal static arguments and shapes.

Outside of `jax.jit`, a loop or a branch of a function that is called anew is compiled anew, and its
program stays in memory. A call that goes through here is traced and compiled once.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax

_Result = TypeVar("_Result")


def _program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    program = jax.jit(functools.partial(function, *static))

    def call(*arrays: Any) -> Any:
        if not (jax.config.jax_debug_nans or jax.config.jax_debug_infs):  # type: ignore[attr-defined]
            return program(*arrays)
        # An open cut and a q without a further token are infinite, and mean no mistake.
        with jax.debug_nans(False), jax.debug_infs(False):
            return program(*arrays)

    return call


_program_of = functools.lru_cache(maxsize=None, typed=True)(_program)
_program_with_rule = functools.lru_cache(maxsize=8, typed=True)(_program)


def compiled(function: Callable[..., _Result], *static: Hashable) -> Callable[..., _Result]:
    """The function with its first arguments as they are, compiled: the same object for equal ones.

    The function is one of a module's top. Arguments of another type are others: 2.0 is no 2.
    """
    return _program_of(function, *static)


def compiled_with_rule(
    function: Callable[..., _Result], *static: Hashable
) -> Callable[..., _Result]:
    """The same where an argument is a function of the user's, which may be another in each call.

    Only the last few programs are kept.
    """
    return _program_with_rule(function, *static)


def is_traced(arrays: Any) -> bool:
    """Whether any array of a tree is part of a trace."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays))
