"""Work on rows of logits in blocks, so that temporaries are a few blocks and not a few copies."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.xla.selection import selection_size

# On a CPU a block's temporaries fit its caches. Starting an operation costs as much as a few
# thousand logits, and a loop copies each of its blocks: so small calls are one block.
CPU_BYTES = 7 << 20
# Elsewhere each operation is a launch, so a block has as many rows as keep any such chip busy.
WIDE_ROWS = 256
# A loop over an unknown number of rows: its start costs as many launches as a third of a block.
LOOP_ROWS = 320
TPU_LOOP_ROWS = 512

Outputs = TypeVar("Outputs", bound=tuple[Any, ...])
Values = TypeVar("Values")  # a tree of arrays


def rows_on_cpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a CPU.

    Args:
      logits: [N, V].
      num_targets: R.
      k: columns to select.
      dynamic: whether the number of rows is known only when the program runs. Then blocks are
        smaller, so that the work follows it.
    """
    if is_symbolic(logits, num_targets):
        return num_targets
    itemsize = logits.dtype.itemsize
    vocabulary = logits.shape[1]
    # The sums and maxima of groups, and the selection.
    bytes_per_row = vocabulary + vocabulary * itemsize // 8 + 8 * selection_size(vocabulary, k)
    copies = 2 * vocabulary * itemsize  # where rows are taken block by block
    if vocabulary % 8:  # one is made of all rows too, and one in float32
        bytes_per_row += vocabulary * (itemsize + 4)
        copies //= 2
    if not dynamic and num_targets * bytes_per_row <= CPU_BYTES:
        return num_targets
    bytes_per_row += copies
    rows = max(1, CPU_BYTES // bytes_per_row)
    if dynamic:
        rows = min(rows, max(8, num_targets // 4))
    rows = min(num_targets, rows)
    return -(-num_targets // -(-num_targets // rows))  # the last block repeats few rows


def rows_on_tpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a TPU; arguments as `rows_on_cpu`."""
    if is_symbolic(logits, num_targets) or not dynamic:
        return num_targets  # the TPU compiler needs no temporaries for them
    return min(num_targets, TPU_LOOP_ROWS)


def rows_on_gpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a GPU; arguments as `rows_on_cpu`."""
    if is_symbolic(logits, num_targets):
        return num_targets
    if dynamic:
        return min(num_targets, LOOP_ROWS)
    # All, if the selection's temporaries take no more than `WIDE_ROWS` rows in float32 would.
    vocabulary = logits.shape[1]
    bytes_per_row = 16 * selection_size(vocabulary, k)
    return min(num_targets, max(WIDE_ROWS, WIDE_ROWS * 4 * vocabulary // bytes_per_row))


def is_symbolic(logits: jax.Array, num_targets: int) -> bool:
    """Whether a number of rows is a dimension variable of `jax.export`: all are one block then."""
    return not (isinstance(num_targets, int) and isinstance(logits.shape[0], int))


def map_blocks(
    work: Callable[[jax.Array], Outputs],
    block: int,
    num_rows: jax.Array | None,
    initial: Outputs,
    inputs: Any,
) -> Outputs:
    """Call work(start) for each block of rows and put the outputs together.

    Args:
      work: returns the outputs [block, ...] of rows start .. start + block - 1, or of the last
        `block` rows where these reach beyond R, as `lax.dynamic_slice` does.
      block: rows at a time.
      num_rows: int32 scalar; blocks from there on keep `initial`. None: all rows.
      initial: a tree of [R, ...] arrays, R >= block.
      inputs: a tree of the arrays that `work` closes over.
    """
    rows = jax.tree.leaves(initial)[0].shape[0]
    if block == rows:
        return work(jnp.int32(0))

    def step(carry: tuple[jax.Array, Outputs]) -> tuple[jax.Array, Outputs]:
        # The last block may reach beyond the rows. Slices and updates begin early then, all alike:
        # rows done twice get equal values.
        start, done = carry
        updated: Outputs = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 0),
            done,
            work(start),
        )
        return start + block, updated

    last = jnp.int32(rows) if num_rows is None else jnp.minimum(num_rows, rows)
    first = (jnp.int32(0), initial)
    _, outputs = lax.while_loop(lambda carry: carry[0] < last, step, vary_like(first, inputs))
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
