"""Functions of jax whose results have no type there, with one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

Values = TypeVar("Values")  # a tree of arrays
Result = TypeVar("Result")
Bound = int | jax.Array


def tree_map(function: Callable[..., Any], tree: Values, *rest: Any) -> Values:
    """`jax.tree.map` to a tree of the same class."""
    return jax.tree.map(function, tree, *rest)  # type: ignore[no-any-return]


def fori_loop(
    begin: Bound, end: Bound, body: Callable[[jax.Array, Values], Values], initial: Values
) -> Values:
    """`lax.fori_loop`."""
    return lax.fori_loop(begin, end, body, initial)  # type: ignore[no-any-return]


def cond(
    predicate: jax.Array,
    taken: Callable[..., Result],
    otherwise: Callable[..., Result],
    *arguments: Any,
) -> Result:
    """`lax.cond`."""
    return lax.cond(predicate, taken, otherwise, *arguments)  # type: ignore[no-any-return]


def switch(index: jax.Array, branches: Sequence[Callable[..., Result]], *arguments: Any) -> Result:
    """`lax.switch`."""
    return lax.switch(index, branches, *arguments)  # type: ignore[no-any-return]


def optimization_barrier(values: Values) -> Values:
    """`lax.optimization_barrier`."""
    return lax.optimization_barrier(values)  # type: ignore[no-any-return]
