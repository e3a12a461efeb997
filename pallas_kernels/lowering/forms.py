"""Forms of work on arrays that XLA compiles well: rows by blocks, in branches, compacted.

Temporaries are a few blocks and not a few copies.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.lowering import typed

Tree: TypeAlias = "jax.Array | Sequence[Tree] | None"  # of arrays, in tuples and lists

_Values = TypeVar("_Values", bound=Tree)

_Joined = TypeVar("_Joined")
_Result = TypeVar("_Result", bound=Tree)


def map_blocks(
    work: Callable[[jax.Array], _Result],
    block: int,
    num_rows: jax.Array | None,
    initial: _Result,
    inputs: Tree,
) -> _Result:
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

    def step(carry: tuple[jax.Array, _Result]) -> tuple[jax.Array, _Result]:
        # The last block may reach beyond the rows. Slices and updates begin early then, all alike:
        # rows done twice get equal values.
        start, done = carry
        updated: _Result = jax.tree.map(
            lambda array, part: lax.dynamic_update_slice_in_dim(array, part, start, 0),
            done,
            work(start),
        )
        return start + block, updated

    last = jnp.int32(rows) if num_rows is None else jnp.minimum(num_rows, rows)
    first = (jnp.int32(0), initial)
    _, outputs = lax.while_loop(lambda carry: carry[0] < last, step, vary_like(first, inputs))
    return outputs


def in_branch(taken: jax.Array, function: Callable[..., _Result], *arguments: Tree) -> _Result:
    """function(*arguments) in a branch; where it is not taken: NaN, and 0 of what has none.

    XLA's CPU compiler copies what a branch is given, and runs what is in it as a list of its own.
    """

    @jax.jit  # traced once, for its shapes and in the branch
    def run(*arguments: Tree) -> _Result:
        return vary_like(function(*arguments), arguments)

    def missing(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype)

    def not_taken(*arguments: Tree) -> _Result:
        values: _Result = jax.tree.map(missing, jax.eval_shape(run, *arguments))
        return vary_like(values, arguments)

    outputs: _Result = typed.cond(taken, run, not_taken, *arguments)
    return outputs


def in_one_loop(x: jax.Array) -> jax.Array:
    """x [B, n, ...] as the beginning of [B, n + 1, ...], computed in one thread of a CPU.

    For what is so small that waking another thread takes as long. XLA's CPU compiler splits a loop
    that computes more than it reads among threads, unless it updates an array in place: so x is
    written into a longer one, which the caller cuts where it is done.
    """
    start = barrier(jnp.int32(0))  # at a constant one, the compiler makes a pad of it
    longer = jnp.zeros((x.shape[0], x.shape[1] + 1, *x.shape[2:]), x.dtype)
    starts = [start, start, *[jnp.int32(0)] * (x.ndim - 2)]
    return barrier(lax.dynamic_update_slice(*vary_like((barrier(longer), x, starts), [x])))


def pin_to_iteration(logits: jax.Array, start: jax.Array) -> jax.Array:
    """The logits as a value of this iteration: else XLA would widen all of them before the loop."""
    return barrier((logits, start))[0]


def rows_from(values: _Values, start: jax.Array, block: int) -> _Values:
    """Rows start .. start + block of a tree of arrays [R, ...]; if those are all, as they are."""

    def part(x: jax.Array) -> jax.Array:
        return x if x.shape[0] == block else lax.dynamic_slice_in_dim(x, start, block)

    return typed.tree_map(part, values)


def block_of_logits(
    logits: jax.Array, row_ids: jax.Array | None, start: jax.Array, block: int
) -> jax.Array:
    """The logits [block, V] of target rows from `start` on, in an iteration of `map_blocks`.

    Args:
      logits: [N, V].
      row_ids: [R] int32, the rows of the targets, clamped to those that there are; None: R = N.
      start, block: which targets.
    """
    if row_ids is not None:
        rows, pinned = rows_from(row_ids, start, block), pin_to_iteration(logits, start)
        if block == 1:  # a plain slice: XLA copies it at memory speed on every platform
            return barrier(lax.dynamic_slice_in_dim(pinned, rows[0], 1))
        return barrier(pinned.at[rows].get(mode="clip"))
    if block == logits.shape[0]:
        return logits
    return rows_from(pin_to_iteration(logits, start), start, block)


def compacted(which: Bool[Array, " N"]) -> tuple[Int32[Array, " N"], Int32[Array, ""]]:
    """The rows that are chosen, in their order, then others; and how many are."""
    # Numbers of which those of the first rows are the largest: XLA:CPU has a call for it.
    number = which.shape[0]
    order = jnp.arange(number, 0, -1, dtype=jnp.float32) + jnp.where(which, number, 0)
    return lax.top_k(order, number)[1], which.sum(dtype=jnp.int32)


def scattered(
    base: _Values, part: _Values, index: Int32[Array, " N"], number: Int32[Array, ""]
) -> _Values:
    """A tree of arrays [N] with the first `number` of `part`, at rows `index`; none from N on."""
    counts = jnp.arange(index.shape[0], dtype=jnp.int32) < number
    place = jnp.where(counts, index, index.shape[0])
    return typed.tree_map(lambda x, new: x.at[place].set(new, mode="drop"), base, part)


def barrier(values: _Values) -> _Values:
    """`lax.optimization_barrier`, which has no type annotations."""
    return typed.optimization_barrier(values)


def vary_like(values: _Values, inputs: Tree) -> _Values:
    """The values, varying over every mesh axis of `shard_map` over which an input varies.

    A loop's first carry must vary as its inputs do. So must the outputs of a GPU kernel, of which
    JAX knows only shapes.

    Args:
      values: a tree of arrays [...], as is what comes back.
      inputs: another one.
    """
    axes = frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(inputs)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return typed.tree_map(vary, values)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes of the surrounding `shard_map` over which x may differ."""
    axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return axes
