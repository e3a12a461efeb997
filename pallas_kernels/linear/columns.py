"""Logits of all rows, a few columns at a time: the head is read once, from one end to the other.

Counting larger logits needs the given token's own before its column is met. `given_logits` computes
it beforehand by products of the same shape, of which a matrix unit's bits do not depend on the
columns beside it. Where they do after all, its real one is known at the end, and `recount` counts
again. So token ranks are always those of the logits in the blocks.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.definition import Definition, head_rows, stored
from pallas_kernels.lowering.blocks import barrier, vary_like
from pallas_kernels.numbers.ordered_keys import strictly_larger
from pallas_kernels.numbers.pieces import in_pairs, pieces, reduced

PIECES = 16  # of the columns that are counted again
GIVEN = 64  # columns of a product: as few as have the bits of more


def given_logits(
    definition: Definition,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    columns: jax.Array,
) -> jax.Array:
    """The logit [R] float32 of one column each, by the diagonals of products of a few columns.

    Args:
      definition: of the logits.
      hidden: [R, H].
      head: [W, H], or as the definition says.
      bias: [W] or None.
      columns: [R] int32 in [0, W).
    """
    rows = hidden.shape[0]
    block = min(GIVEN, rows)
    padded = jnp.pad(columns, (0, GIVEN))

    def step(i: jax.Array, found: jax.Array) -> jax.Array:
        start = jnp.minimum(i * block, rows - block)
        mine = lax.dynamic_slice_in_dim(padded, start, GIVEN)
        own_bias = None if bias is None else bias[mine]
        x = definition.logits(
            head_rows(hidden, start, block),
            barrier(jnp.take(barrier((head, i))[0], mine, axis=definition.axis)),
            own_bias,
        )
        diagonal = jnp.diagonal(x[:, :block]).astype(jnp.float32)
        return lax.dynamic_update_slice_in_dim(found, diagonal, start, 0)

    empty = vary_like(jnp.zeros(rows, jnp.float32), (hidden, head, bias, columns))
    found: jax.Array = lax.fori_loop(0, -(-rows // block), step, empty)
    return found


def filled(
    definition: Definition,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    start: jax.Array,
    real: tuple[jax.Array, jax.Array],
    buffer: jax.Array,
    piece: int,
) -> jax.Array:
    """The buffer [R or more, columns], `stored`, with the logits of the columns from `start` on.

    Columns outside of `real`, a first one and an end, hold -inf.
    """

    def step(j: jax.Array, buffer: jax.Array) -> jax.Array:
        x = logits(definition, hidden, head, bias, start + j * piece, real, piece)
        return lax.dynamic_update_slice(buffer, stored(x), (jnp.int32(0), j * piece))

    found: jax.Array = lax.fori_loop(0, buffer.shape[1] // piece, step, buffer)
    return found


def logits(
    definition: Definition,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    first: jax.Array,
    real: tuple[jax.Array, jax.Array],
    piece: int,
) -> jax.Array:
    """The logits [R, piece] of the columns from `first` on; -inf outside of `real`."""
    own_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, first, piece)
    x = definition.logits(hidden, head_rows(head, first, piece, definition.axis), own_bias)
    columns = first + jnp.arange(piece, dtype=jnp.int32)
    inside = (columns >= real[0]) & (columns < real[1])
    return jnp.where(inside[None], x, jnp.asarray(-jnp.inf, x.dtype))


def recount(
    definition: Definition,
    piece: int,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    given: jax.Array,
) -> jax.Array:
    """How many logits of each row are strictly larger than `given` [R] float32: [R] int32."""
    width = definition.width(head)

    def step(i: jax.Array, count: jax.Array) -> jax.Array:
        seen = i * piece
        start = jnp.minimum(seen, width - piece)
        x = logits(definition, hidden, head, bias, start, (seen, limit), piece)
        than = given[:, None].astype(x.dtype)
        # In pieces: a sum of all columns would have them in memory once more. Float32 is exact.
        larger = [strictly_larger(x, than).astype(jnp.float32) for x in pieces(x, PIECES, -jnp.inf)]
        total = reduced(jnp.add, in_pairs(jnp.add, larger), PIECES, 0)
        return count + total.astype(jnp.int32)

    zeros = vary_like(jnp.zeros(hidden.shape[0], jnp.int32), (hidden, head, bias, limit, given))
    found: jax.Array = lax.fori_loop(0, -(-width // piece), step, zeros)
    return found
