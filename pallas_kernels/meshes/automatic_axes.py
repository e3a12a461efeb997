"""Calls on logits [B, ..., V] of which only the compiler knows how they are split.

With automatic axes, XLA would gather the rows for what is looked up in them. The compiler asks
`partition` with the split that it has found, and every device then computes on its own slots and
columns, as it does with explicit axes. On one device the call is compiled as it is.

`pallas_kernels/meshes/partitioned.py` does the same for the calls of that package.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.lowering.implementation import kept
from pallas_kernels.meshes.vocab_shard import WHOLE, VocabShard

Result = TypeVar("Result")
Axes = tuple[str, ...]  # of a mesh, that split one dimension together


def may_be_split(logits: jax.Array) -> bool:
    """Whether the compiler may split these logits: traced, and all axes of the mesh automatic."""
    if not isinstance(logits, jax.core.Tracer):
        return False
    types = jax.typeof(logits).sharding.mesh.axis_types
    return all(kind == AxisType.Auto for kind in types)


def on_own_part(
    call: Callable[[VocabShard, Any, Any], Result], logits: Any, by_slot: Any
) -> Result:
    """`call(shard, logits, by_slot)`, by each device on its own part: see `explicit_axes`.

    Args:
      call: as for `explicit_axes.on_own_part`. It closes over no traced value.
      logits: arrays [B, ..., V] that are split alike.
      by_slot: arrays [B, ...].
    """
    call = kept(call)  # the compiler asks for the parts after this function has returned
    arrays, tree = jax.tree.flatten((logits, by_slot))
    number = len(jax.tree.leaves(logits))
    shapes: list[Any] = []  # of the results, from the one trace of the call on whole logits

    def of(shard: VocabShard, present: tuple[jax.Array, ...]) -> Result:
        left = iter(present)
        empty = (len(present[0]),)
        every = [next(left) if x.size else jnp.zeros(empty + x.shape[1:], x.dtype) for x in arrays]
        return call(shard, *jax.tree.unflatten(tree, every))

    def whole(*present: jax.Array) -> list[jax.Array]:
        found = of(WHOLE, present)
        shapes[:] = [jax.tree.map(jax.typeof, found)]
        return _not_empty(found)

    def rule(*_: Any) -> SdyShardingRule:
        return _rule(number, _not_empty(arrays), _not_empty(shapes))

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        slots, columns = _even(arg_shapes[0], mesh)

        def placed(x: Any, *last: Axes) -> NamedSharding:
            between = [None] * (x.ndim - 1 - len(last))
            spec = PartitionSpec(*(axes or None for axes in (slots, *between, *last)))  # type: ignore[no-untyped-call]
            return NamedSharding(mesh, spec)

        def on_own(*present: jax.Array) -> list[jax.Array]:
            return _not_empty(of(VocabShard(columns or None), present))

        of_arguments = [
            placed(x, columns) if index < number else placed(x)
            for index, x in enumerate(arg_shapes)
        ]
        return mesh, on_own, [placed(x) for x in result_shapes], tuple(of_arguments)

    program: Any = custom_partitioning(whole)  # type: ignore[no-untyped-call]
    program.def_partition(partition, sharding_rule=rule)
    batched = jax.custom_batching.custom_vmap(lambda *present: program(*present))

    @batched.def_vmap
    def _vmap(_: int, is_batched: Any, *present: jax.Array) -> tuple[list[jax.Array], Any]:
        found = jax.vmap(whole, [0 if one else None for one in is_batched])(*present)
        return found, [True] * len(found)

    # Tokens have no derivative, and what the compiler asks for later has no rule for one.
    found = iter(batched(*jax.lax.stop_gradient(_not_empty(arrays))))
    outputs: Result = jax.tree.map(
        lambda x: next(found) if x.size else jnp.zeros(x.shape, x.dtype), shapes[0]
    )
    return outputs


def _not_empty(tree: Any) -> list[Any]:
    """The arrays that have elements: an axis of size 0 cannot be named in a sharding rule."""
    return [x for x in jax.tree.leaves(tree) if x.size]


def _rule(number: int, arguments: list[Any], results: list[Any]) -> SdyShardingRule:
    """How a split spreads: by slots, from the logits to all else; columns among the logits."""

    def axes(kind: str, index: int, rank: int) -> tuple[str, ...]:
        return ("b", *(f"{kind}{index}x{axis}" for axis in range(1, rank)))

    operands: list[Any] = [
        (*axes("a", index, x.ndim - 1), "v") if index < number else axes("a", index, x.ndim)
        for index, x in enumerate(arguments)
    ]
    outputs: list[Any] = [axes("r", index, x.ndim) for index, x in enumerate(results)]
    return SdyShardingRule(tuple(operands), tuple(outputs))


def _even(logits: Any, mesh: Any) -> tuple[Axes, Axes]:
    """The mesh axes that split slots and columns, less those that do not divide them."""
    sharding = logits.sharding
    if not isinstance(sharding, NamedSharding):
        return (), ()
    spec = (*sharding.spec, *[None] * logits.ndim)[: logits.ndim]

    def even(axis: Any, size: int) -> Axes:
        names: Axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
        return names if size % math.prod(mesh.shape[name] for name in names) == 0 else ()

    return even(spec[0], logits.shape[0]), even(spec[-1], logits.shape[-1])
