"""One function for each platform that a program may be lowered for.

Whether a program is for CUDA or a TPU is known when it is lowered: a CUDA host may run a program on
its CPU, and any host may export one for CUDA. `lowered_for` traces only the function of the
platform that a program is lowered for: the others cost nothing, and may import what only their
platform has. (`jax.lax.platform_dependent` traces all of them.)
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_kernels.lowering.forms import Tree, vary_like
from pallas_kernels.lowering.implementation import bind_implementation

_Result = TypeVar("_Result", bound=Tree)
PLATFORMS = ("cpu", "cuda", "tpu")


Flat = Callable[..., list[jax.Array]]  # of arrays

Named = tuple[tuple[str, Flat], ...]  # by platform

Static = Flat | Named  # what the choice's primitive has beside arrays


def _flat(function: Callable[..., Tree], tree: jax.tree_util.PyTreeDef) -> Flat:
    """A function of the arrays of `tree`, which returns a list of arrays."""
    return lambda *arrays: jax.tree.leaves(function(*jax.tree.unflatten(tree, arrays)))


def lowered_for(
    *arguments: Tree,
    like: Callable[..., _Result],
    default: Callable[..., _Result],
    **others: Callable[..., _Result],
) -> _Result:
    """The results of the platform's function: one of `others` by name ("cpu"), else `default`.

    All functions take the arguments, trees of arrays. `like` is traced for the results' shapes and
    dtypes alone. Under `shard_map` the results vary over every mesh axis over which an argument
    does: that is a part of their type. The function that is traced later finds the implementation
    that is named now.
    """
    arrays, tree = jax.tree.flatten(arguments)
    default = bind_implementation(default)
    others = {name: bind_implementation(other) for name, other in others.items()}
    functions = {name: _flat(others.get(name, default), tree) for name in PLATFORMS}
    # The results' tree, from when `_choice` traces `typed` for their types.
    results: list[jax.tree_util.PyTreeDef] = []

    def typed(*values: Tree) -> _Result:
        result = vary_like(like(*values), values)
        results[:] = [jax.tree.structure(result)]
        return result

    leaves = _choice.bind(
        *arrays,
        like=_flat(typed, tree),
        default=_flat(default, tree),
        functions=tuple(functions.items()),
    )
    result: _Result = jax.tree.unflatten(results[0], leaves)
    return result


_choice = Primitive("lowered_for")

_choice.multiple_results = True


def _types(*avals: ShapedArray, like: Flat, **_: Static) -> list[ShapedArray]:
    return list(jax.make_jaxpr(like)(*avals).out_avals)


def _run(*arrays: jax.Array, **params: Static) -> list[jax.Array]:
    # One operation to whoever looks at each: without `jit` it would call itself for ever.
    with jax.disable_jit(False):
        results: list[jax.Array] = jax.jit(functools.partial(_choice.bind, **params))(*arrays)
    return results


def _lowering(
    name: str | None,
    ctx: mlir.LoweringRuleContext,
    *values: mlir.ir.Value,
    default: Flat,
    functions: Named,
    like: Flat,
) -> Sequence[mlir.ir.Value]:
    function = default if name is None else dict(functions)[name]
    lowered: Sequence[mlir.ir.Value] = mlir.lower_fun(function)(ctx, *values)
    return lowered


_choice.def_abstract_eval(_types)

_choice.def_impl(_run)

mlir.register_lowering(_choice, functools.partial(_lowering, None))

for _name in PLATFORMS:
    mlir.register_lowering(_choice, functools.partial(_lowering, _name), platform=_name)


def _batched(
    arrays: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    like: Flat,
    default: Flat,
    functions: Named,
) -> tuple[list[jax.Array], list[int]]:
    def over_batch(leaves: Flat) -> Flat:
        return jax.vmap(leaves, in_axes=tuple(axes))

    results = _choice.bind(
        *arrays,
        like=over_batch(like),
        default=over_batch(default),
        functions=tuple((name, over_batch(function)) for name, function in functions),
    )
    return results, [0] * len(results)


batching.primitive_batchers[_choice] = _batched
