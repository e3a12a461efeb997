"""Calls on logits [B, ..., V] of a user's mesh, with explicit or automatic axes.

Explicit axes are part of an array's type, so a function that mixes split and whole arrays would
have to name a sharding at every step. Each device computes on its own slots and columns instead.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
from jax.sharding import AxisType, Mesh

from pallas_kernels.meshes import split
from pallas_kernels.meshes.split import Layout, names_of
from pallas_kernels.meshes.vocab_shard import AxisName, VocabShard

Logits = TypeVar("Logits")  # a tree of arrays [B, ..., V]
BySlot = TypeVar("BySlot")  # a tree of arrays [B, ...]
Result = TypeVar("Result")  # a tree of arrays [B, ...]


class Split(NamedTuple):
    """What a caller says of how the vocabulary of logits is split."""

    mesh: Mesh | None = None  # outside `shard_map`, that of `axis_name`
    axis_name: AxisName | None = None  # (): all columns are here, and nothing need be asked
    vocab_size: int | None = None  # V where columns of padding follow


def on_own_part(
    call: Callable[[VocabShard, Logits, BySlot], Result],
    logits: Logits,
    by_slot: BySlot,
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
    first = jax.tree.leaves(logits)[0]
    arrays = (logits, by_slot)
    words = (
        *("n" + "." * (x.ndim - 2) + "v" for x in jax.tree.leaves(logits)),
        *("n" + "." * (x.ndim - 1) for x in jax.tree.leaves(by_slot)),
    )

    def of_part(layout: Layout, arrays: tuple[Logits, BySlot]) -> Result:
        return call(layout.shard(how.vocab_size), *arrays)

    if how.mesh is not None:
        assert how.axis_name
        layout, manual = Layout((), names_of(how.axis_name)), how.mesh.axis_names
        return split.on_mesh(of_part, how.mesh, layout, arrays, words, manual=manual)
    if how.axis_name:
        return call(VocabShard(how.axis_name, how.vocab_size), logits, by_slot)
    sharding = jax.typeof(first).sharding
    if first.ndim >= 2 and AxisType.Explicit in sharding.mesh.axis_types:
        layout = split.layout_of(sharding, first.ndim)
        if layout != Layout():
            return split.on_mesh(of_part, sharding.mesh, layout, arrays, words)
    elif how == Split() and split.may_be_split(first):
        return split.where_compiled(of_part, arrays, words)
    return of_part(Layout(), arrays)
