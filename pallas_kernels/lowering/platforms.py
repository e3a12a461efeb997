"""A choice that is made where a program is lowered, and what only the lowering knows.

A CUDA host may run a program on its CPU, and a CPU host may export one for CUDA. `lowered_for`
traces only the function of the platform that the program is lowered for: the others cost nothing,
and may import what only their platform has. (`jax.lax.platform_dependent` traces all of them.)
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_kernels.lowering.blocks import vary_like

Result = TypeVar("Result")
PLATFORMS = ("cpu", "cuda", "tpu")


Flat = Callable[..., list[jax.Array]]  # of arrays


def _flat(function: Callable[..., Any], tree: Any) -> Flat:
    """A function of the arrays of `tree`, which returns a list of arrays."""
    return lambda *arrays: jax.tree.leaves(function(*jax.tree.unflatten(tree, arrays)))


def lowered_for(
    *arguments: Any,
    like: Callable[..., Result],
    default: Callable[..., Result],
    **others: Callable[..., Result],
) -> Result:
    """What the platform's function returns: one of `others` by name ("cpu"), else `default`.

    All functions take the arguments, trees of arrays. `like` is traced for the results' shapes and
    dtypes alone. Under `shard_map` the results vary over every mesh axis over which an argument
    does: that is a part of their type.
    """
    arrays, tree = jax.tree.flatten(arguments)
    functions = {name: _flat(others.get(name, default), tree) for name in PLATFORMS}
    results: list[Any] = []  # their tree, from when `_choice` traces `typed` for their types

    def typed(*given: Any) -> Result:
        result = vary_like(like(*given), given)
        results[:] = [jax.tree.structure(result)]
        return result

    found = _choice.bind(
        *arrays,
        like=_flat(typed, tree),
        default=_flat(default, tree),
        functions=tuple(functions.items()),
    )
    chosen: Result = jax.tree.unflatten(results[0], found)
    return chosen


_choice: Any = Primitive("lowered_for")
_choice.multiple_results = True


def _types(*avals: Any, like: Flat, **_: Any) -> list[Any]:
    return list(jax.make_jaxpr(like)(*avals).out_avals)


def _run(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    found: list[jax.Array] = jax.jit(functools.partial(_choice.bind, **params))(*arrays)
    return found


def _lowering(name: str | None, ctx: Any, *values: Any, default: Flat, **params: Any) -> Any:
    function = default if name is None else dict(params["functions"])[name]
    return mlir.lower_fun(function)(ctx, *values)


_choice.def_abstract_eval(_types)
_choice.def_impl(_run)
mlir.register_lowering(_choice, functools.partial(_lowering, None))
for _name in PLATFORMS:
    mlir.register_lowering(_choice, functools.partial(_lowering, _name), platform=_name)


def _batched(arrays: Any, axes: Any, *, like: Flat, default: Flat, functions: Any) -> Any:
    def over_batch(one: Flat) -> Flat:
        return jax.vmap(one, in_axes=tuple(axes))

    found = _choice.bind(
        *arrays,
        like=over_batch(like),
        default=over_batch(default),
        functions=tuple((name, over_batch(function)) for name, function in functions),
    )
    return found, [0] * len(found)


batching.primitive_batchers[_choice] = _batched
