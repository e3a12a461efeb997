"""Calls on logits [B, ..., V] of a user's mesh, with explicit or automatic axes.

Explicit axes are part of an array's type, so a function that mixes split and whole arrays would
have to name a sharding at every step. Under `jax.shard_map` each device computes on its own slots
and columns instead, as it does with automatic axes (`automatic_axes`).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_specdec.device.model.sharding import Parallel
from pallas_kernels import WHOLE, VocabShard
from pallas_kernels.meshes import automatic_axes

Result = TypeVar("Result")


def on_own_part(
    call: Callable[[VocabShard, Any, Any], Result],
    logits: Any,
    by_slot: Any,
    parallel: Parallel | None = None,
) -> Result:
    """`call(shard, logits, by_slot)`, by each device on its own slots and columns.

    Args:
      call: its results start with the axis B, and are the same on every vocabulary shard.
      logits: arrays [B, ..., V] that are split alike; the first one's type tells how. The axes
        between B and V are gathered if they are split.
      by_slot: arrays [B, ...].
      parallel: the devices that hold the columns, where the caller knows; slots are whole then.
        None: the logits' type tells, or with automatic axes the compiler; then `call` closes over
        no traced value.

    Returns:
      The results, split by slots as the logits are.
    """
    if parallel is not None and parallel.mesh is not None:
        return parallel.over_vocabulary(call, logits, by_slot)
    first = jax.tree.leaves(logits)[0]
    mesh, slots, columns = explicit_split(first)
    if mesh is None:
        if parallel is None and automatic_axes.may_be_split(first):
            return automatic_axes.on_own_part(call, logits, by_slot)
        return call(WHOLE, logits, by_slot)
    shard = VocabShard(columns)

    def placed(x: jax.Array, *axes: Any) -> jax.Array:
        there: jax.Array = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*axes)))  # type: ignore[no-untyped-call]
        return there

    def spec_of(x: jax.Array) -> PartitionSpec:
        return PartitionSpec(slots, *[None] * (x.ndim - 2), columns)  # type: ignore[no-untyped-call]

    own = PartitionSpec(slots)  # type: ignore[no-untyped-call]
    mapped: Callable[[Any, Any], Result] = jax.shard_map(
        lambda logits, by_slot: call(shard, logits, by_slot),
        mesh=mesh,
        in_specs=(jax.tree.map(spec_of, logits), own),
        out_specs=own,
        axis_names={*_names(slots), *_names(columns)},
    )
    return mapped(
        jax.tree.map(lambda x: placed(x, *spec_of(x)), logits),
        jax.tree.map(lambda x: placed(x, slots), by_slot),
    )


def explicit_split(x: jax.Array) -> tuple[Any, Any, Any]:
    """The mesh of x [B, ..., V], and the explicit axes that split B and V.

    Three times None where no explicit axis splits either.
    """
    sharding = jax.typeof(x).sharding
    if x.ndim < 2 or AxisType.Explicit not in sharding.mesh.axis_types:
        return None, None, None
    slots, *_, columns = (*sharding.spec, *[None] * x.ndim)[: x.ndim]
    return (sharding.mesh, slots, columns) if slots or columns else (None, None, None)


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)
