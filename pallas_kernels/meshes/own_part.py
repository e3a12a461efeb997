"""Calls on logits [B, ..., V] of a user's mesh, with explicit or automatic axes.

Explicit axes are part of an array's type, so a function that mixes split and whole arrays would
have to name a sharding at every step. Under `jax.shard_map` each device computes on its own slots
and columns instead, as it does with automatic axes (`automatic_axes`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.meshes import automatic_axes
from pallas_kernels.meshes.vocab_shard import AxisName, VocabShard

Result = TypeVar("Result")


class Split(NamedTuple):
    """What a caller says of how the vocabulary of logits is split."""

    mesh: Mesh | None = None  # outside `shard_map`, that of `axis_name`
    axis_name: AxisName | None = None  # (): all columns are here, and nothing need be asked
    vocab_size: int | None = None  # V where columns of padding follow


def on_own_part(
    call: Callable[[VocabShard, Any, Any], Result],
    logits: Any,
    by_slot: Any,
    how: Split,
) -> Result:
    """`call(shard, logits, by_slot)`, by each device on its own slots and columns.

    Args:
      call: its results start with the axis B, and are the same on every vocabulary shard.
      logits: arrays [B, ..., V] that are split alike; the first one's type tells how. The axes
        between B and V are gathered if they are split.
      by_slot: arrays [B, ...].
      how: the mesh axis that splits the columns, where the caller knows; slots are whole then.
        Without, the logits' type tells, or with automatic axes the compiler; then `call` closes
        over no traced value.

    Returns:
      The results, split by slots as the logits are.
    """
    if how.mesh is not None:
        assert how.axis_name
        return over_vocabulary(call, logits, by_slot, how)
    if how.axis_name:
        return call(VocabShard(how.axis_name, how.vocab_size), logits, by_slot)
    whole = VocabShard(None, how.vocab_size)
    first = jax.tree.leaves(logits)[0]
    mesh, slots, columns = explicit_split(first)
    if mesh is None:
        if how == Split() and automatic_axes.may_be_split(first):
            return automatic_axes.on_own_part(call, logits, by_slot)
        return call(whole, logits, by_slot)
    shard = VocabShard(columns, how.vocab_size)

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


def over_vocabulary(
    call: Callable[[VocabShard, Any, Any], Result], columns: Any, whole: Any, how: Split
) -> Result:
    """`call(shard, columns, whole)` on each device with its own columns.

    Args:
      call: its result must be the same on every shard.
      columns: arrays [..., V]; a device gets [..., V / shards].
      whole: arrays that every device gets whole.
      how: the mesh and its axis.
    """
    assert how.mesh is not None
    shard = VocabShard(how.axis_name, how.vocab_size)

    def spec_of(x: jax.Array) -> PartitionSpec:
        return PartitionSpec(*[None] * (x.ndim - 1), how.axis_name)  # type: ignore[no-untyped-call]

    everywhere = PartitionSpec()  # type: ignore[no-untyped-call]
    mapped: Callable[[Any, Any], Result] = jax.shard_map(
        lambda columns, whole: call(shard, columns, whole),
        mesh=how.mesh,
        in_specs=(jax.tree.map(spec_of, columns), everywhere),
        out_specs=everywhere,
    )
    return mapped(columns, whole)


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
