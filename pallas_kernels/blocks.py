"""Work on rows of logits in blocks, so that temporaries are a few blocks and not a few copies."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

# A block's float32 copy takes at most 1/16 of the logits' bytes (XLA keeps up to three temporaries
# of that size) and stays within a CPU's cache. 64 KiB are always allowed, for tiny vocabularies.
BLOCK_SHARE = 16
BLOCK_BYTES = 1 << 21
SMALL_BLOCK_BYTES = 1 << 16

Outputs = TypeVar("Outputs", bound=tuple[jax.Array, ...])
Values = TypeVar("Values")  # a tree of arrays


def block_rows(logits: jax.Array, num_targets: int) -> int:
    """The number of rows to work on at a time."""
    bytes_per_row = 4 * logits.shape[1]
    by_memory = logits.size * logits.dtype.itemsize // BLOCK_SHARE // bytes_per_row
    rows = min(by_memory, BLOCK_BYTES // bytes_per_row)
    return min(num_targets, max(1, rows, SMALL_BLOCK_BYTES // bytes_per_row))


def map_blocks(
    work: Callable[[jax.Array], Outputs],
    block: int,
    num_rows: jax.Array | None,
    initial: Outputs,
    inputs: tuple[jax.Array | None, ...],
) -> Outputs:
    """Call work(start) for each block of rows and put the outputs together.

    Args:
      work: returns the outputs [block, ...] of rows start .. start + block - 1.
      block: rows at a time.
      num_rows: int32 scalar; blocks from there on keep `initial`. None: all rows.
      initial: a NamedTuple of [R, ...] arrays, R >= block.
      inputs: what `work` closes over.
    """
    rows = initial[0].shape[0]
    if block == rows:
        return work(jnp.int32(0))

    def step(i: jax.Array, done: Outputs) -> Outputs:
        # The last block starts early rather than ending late: rows done twice get equal values.
        start = jnp.minimum(i * block, rows - block)
        updated: Outputs = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 0),
            done,
            work(start),
        )
        return updated

    last = jnp.int32(rows) if num_rows is None else jnp.clip(num_rows, 0, rows)
    trips = (last + (block - 1)) // block
    outputs: Outputs = lax.fori_loop(jnp.int32(0), trips, step, vary_like(initial, inputs))
    return outputs


def tied(logits: jax.Array, start: jax.Array) -> jax.Array:
    """The logits as a value of this block: else XLA would widen all of them before the loop."""
    same: jax.Array = barrier((logits, start))[0]
    return same


def barrier(values: Any) -> Any:
    """`lax.optimization_barrier`, which has no type annotations."""
    return lax.optimization_barrier(values)  # type: ignore[no-untyped-call]


def vary_like(values: Values, inputs: Any) -> Values:
    """The values, varying over every mesh axis of `shard_map` over which an input varies.

    A loop's first carry must vary as its inputs do. So must the outputs of a GPU kernel, of which
    JAX knows only shapes.
    """
    axes = frozenset[str]().union(*(_varying(x) for x in jax.tree.leaves(inputs)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    varying: Values = jax.tree.map(vary, values)
    return varying


def _varying(x: jax.Array) -> frozenset[str]:
    """The mesh axes of the surrounding `shard_map` over which x may differ."""
    axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return axes
