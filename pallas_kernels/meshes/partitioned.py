"""A call on logits of which only the compiler knows how they are split: automatic mesh axes.

Without it, XLA would gather the logits' rows for the loops over blocks of them. The compiler asks
`partition` with the split that it has found, and every device then reads its own part.

On one device the call is compiled as it is. Programs for several are not kept by JAX's persistent
compilation cache, unless `jax_remove_custom_partitioning_ptr_from_cache_key` is set.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding

from pallas_kernels.contract.changes import Changes
from pallas_kernels.meshes.placement import (
    Arguments,
    Layout,
    Outputs,
    ShardCall,
    argument_specs,
    layout_of,
    on_own_rows,
    spec_of,
)
from pallas_kernels.meshes.vocab_shard import VocabShard


def run(call: ShardCall[Outputs], shard: VocabShard, arguments: Arguments) -> Outputs:
    """`call(shard, *arguments)`, each device on its own part of the logits.

    Args:
      call: as `placement.run` takes it; its outputs' first axis is that of the target rows.
      shard: of all columns.
      arguments: `placement.Arguments`.
    """
    changes = arguments[6]
    flat = (*arguments[:6], *(changes or Changes()))
    present = tuple(x is not None and x.size > 0 for x in flat)
    empty = tuple(x is not None and x.size == 0 for x in flat)
    arrays = tuple(x for x, there in zip(flat, present, strict=True) if there)
    shapes, tree = jax.tree.flatten(jax.eval_shape(functools.partial(call, shard), *arguments))
    # An axis of size 0 cannot be named in a sharding rule: such an output is made here.
    program = _partitioned(call, shard, present, empty, tuple(x.shape for x in shapes))
    found = iter(program(*arrays))
    leaves = (next(found) if x.size else jnp.zeros(x.shape, x.dtype) for x in shapes)
    outputs: Outputs = jax.tree.unflatten(tree, leaves)
    return outputs


@functools.cache
def _partitioned(
    call: ShardCall[Any],
    shard: VocabShard,
    present: tuple[bool, ...],
    empty: tuple[bool, ...],
    shapes: tuple[tuple[int, ...], ...],
) -> Callable[..., tuple[jax.Array, ...]]:
    """A function of the arguments that are present, to the outputs that are not empty."""
    kept = [index for index, shape in enumerate(shapes) if 0 not in shape]

    def arguments_of(arrays: Any) -> tuple[Any, ...]:
        left = iter(arrays)
        given = [next(left) if there else None for there in present]
        num_targets = next(x.shape[0] for x in (given[1], given[2], given[0]) if x is not None)
        none = jnp.zeros((num_targets, 0), jnp.int32)
        flat = [none if gone else x for x, gone in zip(given, empty, strict=True)]
        return (*flat[:6], Changes(*flat[6:]) if any(present[6:]) else None)

    def of(outputs: Any) -> tuple[jax.Array, ...]:
        leaves = jax.tree.leaves(outputs)
        return tuple(leaves[index] for index in kept)

    def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return of(call(shard, *arguments_of(arrays)))

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        layout = _even(layout_of(arg_shapes[0].sharding), mesh, arg_shapes[0].shape)
        left = iter(arg_shapes)
        *of_six, of_changes = argument_specs(
            layout, tuple(next(left) if there else None for there in present)
        )
        specs = (*of_six, *[of_changes] * len(Changes._fields))
        of_result = spec_of(() if present[2] else layout.rows)
        local = functools.partial(call, layout.shard(shard.vocab_size))

        def lower(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return of(on_own_rows(local, layout, arguments_of(arrays)))

        own = [spec for spec, there in zip(specs, present, strict=True) if there]
        return (
            mesh,
            lower,
            tuple(NamedSharding(mesh, of_result) for _ in result_shapes),
            tuple(NamedSharding(mesh, spec) for spec in own),
        )

    partitioned: Any = custom_partitioning(whole)  # type: ignore[no-untyped-call]
    ranks = [len(shapes[index]) for index in kept]
    partitioned.def_partition(partition, sharding_rule=_rule(present, ranks))
    program: Callable[..., tuple[jax.Array, ...]] = partitioned
    return program


def _rule(present: tuple[bool, ...], output_ranks: Sequence[int]) -> SdyShardingRule:
    """How a split spreads from the logits to the results: by rows, where rows are targets."""
    row = "r" if present[2] else "n"
    operands: list[Any] = [("n", "v"), (row,), (row,), (), (row,), (row, "c")]
    operands += [(row, "w"), (row, "d"), (row, "d")]
    results: list[Any] = [(row, f"k{index}")[:rank] for index, rank in enumerate(output_ranks)]
    return SdyShardingRule(
        tuple(one for one, there in zip(operands, present, strict=True) if there),
        tuple(results),
    )


def _even(layout: Layout, mesh: Any, shape: tuple[int, ...]) -> Layout:
    """The layout without an axis that does not divide: there the logits are gathered."""

    def kept(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        count = 1
        for axis in axes:
            count *= mesh.shape[axis]
        return axes if size % count == 0 else ()

    return Layout(kept(layout.rows, shape[0]), kept(layout.vocabulary, shape[1]))
