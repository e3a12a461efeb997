"""A call on logits of which only the compiler knows how they are split: automatic mesh axes.

Without it, XLA would gather the logits' rows for the loops over blocks of them. The compiler asks
`partition` with the split that it has found, and every device then reads its own part.

On one device the call is compiled as it is. Programs for several are not kept by JAX's persistent
compilation cache, unless `jax_remove_custom_partitioning_ptr_from_cache_key` is set.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding

from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.types import Rows
from pallas_kernels.meshes.placement import (
    Layout,
    Result,
    ShardCall,
    layout_of,
    on_own_rows,
    spec_of,
    specs_of,
)
from pallas_kernels.meshes.vocab_shard import VocabShard

# The axes of each array of `Rows`, and of its changes, in a sharding rule without row ids.
_AXES: tuple[tuple[str, ...], ...] = (
    ("n", "v"), ("n",), ("n",), (), ("n",), ("n", "c"), ("n", "w"), ("n", "d"), ("n", "d"),
)  # fmt: skip


def run(call: ShardCall[Result], shard: VocabShard, rows: Rows) -> Result:
    """`call(shard, rows)`, each device on its own part of the logits.

    Args:
      call: as `placement.run` takes it; its outputs' first axis is that of the target rows.
      shard: of all columns.
      rows: of the call.
    """
    arrays, tree = jax.tree.flatten(rows)
    shapes, results = jax.tree.flatten(jax.eval_shape(functools.partial(call, shard), rows))
    # An axis of size 0 cannot be named in a sharding rule: such an array is made where it is used.
    empty = tuple(None if x.size else x.dtype for x in arrays)
    program = _partitioned(call, shard, tree, empty, tuple(x.shape for x in shapes))
    found = iter(program(*(x for x in arrays if x.size)))
    leaves = (next(found) if x.size else jnp.zeros(x.shape, x.dtype) for x in shapes)
    outputs: Result = jax.tree.unflatten(results, leaves)
    return outputs


@functools.cache
def _partitioned(
    call: ShardCall[Any],
    shard: VocabShard,
    tree: jax.tree_util.PyTreeDef,
    empty: tuple[jnp.dtype | None, ...],
    shapes: tuple[tuple[int, ...], ...],
) -> Callable[..., tuple[jax.Array, ...]]:
    """A function of the arrays that are not empty, to the outputs that are not.

    Args:
      call: one device's part.
      shard: of all columns.
      tree: of the rows.
      empty: for each of their arrays, its dtype where it is [R, 0].
      shapes: of the outputs.
    """
    kept = [index for index, shape in enumerate(shapes) if 0 not in shape]

    def rows_of(arrays: tuple[jax.Array, ...]) -> Rows:
        left = iter(arrays)
        given = [next(left) if dtype is None else None for dtype in empty]
        some: Rows = jax.tree.unflatten(tree, given)
        every: Rows = jax.tree.unflatten(
            tree,
            [
                jnp.zeros((some.num_targets, 0), dtype) if x is None else x
                for x, dtype in zip(given, empty, strict=True)
            ],
        )
        return every

    def present(leaves: Rows) -> list[Any]:
        """Of a tree like the rows: what belongs to the arrays that are not empty."""
        flat = tree.flatten_up_to(leaves)
        return [x for x, dtype in zip(flat, empty, strict=True) if dtype is None]

    def of(outputs: Any) -> tuple[jax.Array, ...]:
        leaves = jax.tree.leaves(outputs)
        return tuple(leaves[index] for index in kept)

    def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return of(call(shard, rows_of(arrays)))

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        layout = _even(layout_of(arg_shapes[0].sharding), mesh, arg_shapes[0].shape)
        left = iter(arg_shapes)
        given = [next(left) if dtype is None else _Empty for dtype in empty]
        rows: Rows = jax.tree.unflatten(tree, given)
        local = functools.partial(call, layout.shard(shard.vocab_size))
        of_result = spec_of(() if rows.row_ids is not None else layout.rows)

        def lower(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return of(on_own_rows(local, layout, rows_of(arrays)))

        return (
            mesh,
            lower,
            tuple(NamedSharding(mesh, of_result) for _ in result_shapes),
            tuple(NamedSharding(mesh, spec) for spec in present(specs_of(layout, rows))),
        )

    partitioned: Any = custom_partitioning(whole)  # type: ignore[no-untyped-call]
    places: Rows = jax.tree.unflatten(tree, range(len(empty)))
    # With row ids, the arrays of target rows are split by no axis of the logits.
    row = "n" if places.row_ids is None else "r"
    operands: list[Any] = [("n", "v")]
    for axes, place in zip(_AXES[1:], (*places[1:6], *(places.changes or Changes())), strict=True):
        if place is not None and empty[place] is None:
            operands.append(tuple(row if axis == "n" else axis for axis in axes))
    results: list[Any] = [(row, f"k{i}")[: len(shapes[index])] for i, index in enumerate(kept)]
    rule = SdyShardingRule(tuple(operands), tuple(results))
    partitioned.def_partition(partition, sharding_rule=rule)
    program: Callable[..., tuple[jax.Array, ...]] = partitioned
    return program


class _Empty:
    """Stands for an array [R, 0], of which nothing is split."""

    ndim = 0


def _even(layout: Layout, mesh: Any, shape: tuple[int, ...]) -> Layout:
    """The layout without an axis that does not divide: there the logits are gathered."""

    def kept(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        count = 1
        for axis in axes:
            count *= mesh.shape[axis]
        return axes if size % count == 0 else ()

    return Layout(kept(layout.rows, shape[0]), kept(layout.vocabulary, shape[1]))
