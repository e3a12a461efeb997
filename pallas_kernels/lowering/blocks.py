"""Work on rows of logits in blocks, so that temporaries are a few blocks and not a few copies."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Tree: TypeAlias = "jax.Array | Sequence[Tree] | None"  # of arrays, in tuples and lists
Values = TypeVar("Values", bound=Tree)
Outputs = TypeVar("Outputs", bound=Sequence[Tree])


def map_blocks(
    work: Callable[[jax.Array], Outputs],
    block: int,
    num_rows: jax.Array | None,
    initial: Outputs,
    inputs: Tree,
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


def pin_to_iteration(logits: jax.Array, start: jax.Array) -> jax.Array:
    """The logits as a value of this iteration: else XLA would widen all of them before the loop."""
    same: jax.Array = barrier((logits, start))[0]
    return same


def barrier(values: Values) -> Values:
    """`lax.optimization_barrier`, which has no type annotations."""
    same: Values = lax.optimization_barrier(values)  # type: ignore[no-untyped-call]
    return same


def vary_like(values: Values, inputs: Tree) -> Values:
    """The values, varying over every mesh axis of `shard_map` over which an input varies.

    A loop's first carry must vary as its inputs do. So must the outputs of a GPU kernel, of which
    JAX knows only shapes.

    Args:
      values: a tree of arrays [...], as is what comes back.
      inputs: another one.
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
