"""Functions of jax whose results have no type there, with one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

Values = TypeVar("Values")  # a tree of arrays
Result = TypeVar("Result")
Bound = int | jax.Array
NO_GRADIENT: Any = None  # in the place of an array of integers, among derivatives


def tree_map(function: Callable[..., Any], tree: Values, *rest: Any) -> Values:
    """`jax.tree.map` to a tree of the same class."""
    mapped: Values = jax.tree.map(function, tree, *rest)
    return mapped


def fori_loop(
    begin: Bound, end: Bound, body: Callable[[jax.Array, Values], Values], initial: Values
) -> Values:
    """`lax.fori_loop`."""
    last: Values = lax.fori_loop(begin, end, body, initial)
    return last


def cond(
    predicate: jax.Array,
    taken: Callable[..., Result],
    otherwise: Callable[..., Result],
    *arguments: Any,
) -> Result:
    """`lax.cond`."""
    result: Result = lax.cond(predicate, taken, otherwise, *arguments)
    return result


def switch(index: jax.Array, branches: Sequence[Callable[..., Result]], *arguments: Any) -> Result:
    """`lax.switch`."""
    result: Result = lax.switch(index, branches, *arguments)
    return result


def optimization_barrier(values: Values) -> Values:
    """`lax.optimization_barrier`."""
    same: Values = lax.optimization_barrier(values)
    return same
