"""Functions of jax whose results have no type there, with one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

_Values = TypeVar("_Values")  # a tree of arrays
_Result = TypeVar("_Result")
Bound = int | jax.Array
NO_GRADIENT: Any = None  # in the place of an array of integers, among derivatives


def tree_map(function: Callable[..., Any], tree: _Values, *rest: Any) -> _Values:
    """`jax.tree.map` to a tree of the same class."""
    mapped: _Values = jax.tree.map(function, tree, *rest)
    return mapped


def fori_loop(
    begin: Bound, end: Bound, body: Callable[[jax.Array, _Values], _Values], initial: _Values
) -> _Values:
    """`lax.fori_loop`."""
    last: _Values = lax.fori_loop(begin, end, body, initial)
    return last


def cond(
    predicate: jax.Array,
    taken: Callable[..., _Result],
    otherwise: Callable[..., _Result],
    *arguments: Any,
) -> _Result:
    """`lax.cond`."""
    result: _Result = lax.cond(predicate, taken, otherwise, *arguments)
    return result


def switch(
    index: jax.Array, branches: Sequence[Callable[..., _Result]], *arguments: Any
) -> _Result:
    """`lax.switch`."""
    result: _Result = lax.switch(index, branches, *arguments)
    return result


def optimization_barrier(values: _Values) -> _Values:
    """`lax.optimization_barrier`."""
    same: _Values = lax.optimization_barrier(values)
    return same
