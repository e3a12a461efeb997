"""All rows, a part of the vocabulary at a time: the head is read once, from one end to the other.

    pieces    a few columns of the head are copied and multiplied, into a buffer [R, columns]
    parts     some rows of the buffer are read: sums, counts, the logits named, candidates
    recount   once all is read: where the given token's logit was another one than counted with

Counting larger logits needs the given token's own before its column is met. `given_logits` computes
it beforehand by products of the same shape, of which a matrix unit's bits do not depend on the
columns beside it. Where they do after all, its real one is known at the end, and one more pass
counts again. So token ranks are always those of the logits in the blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import barrier, vary_like
from pallas_kernels.linear import online
from pallas_kernels.linear.definition import Definition, head_rows
from pallas_kernels.linear.plan import Plan
from pallas_kernels.linear.types import RowSums
from pallas_kernels.ordered_keys import strictly_larger
from pallas_kernels.platforms import lowered_for


def given_logits(
    definition: Definition,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    columns: jax.Array,
    piece: int,
) -> jax.Array:
    """The logit [R] float32 of one column each, by the diagonals of products of `piece` columns.

    Args:
      definition: of the logits.
      hidden: [R, H].
      head: [W, H].
      bias: [W] or None.
      columns: [R] int32 in [0, W).
      piece: rows of the head in a product.
    """
    rows = hidden.shape[0]
    block = min(piece, rows)
    padded = jnp.pad(columns, (0, piece))

    def step(i: jax.Array, found: jax.Array) -> jax.Array:
        start = jnp.minimum(i * block, rows - block)
        mine = lax.dynamic_slice_in_dim(padded, start, piece)
        own_bias = None if bias is None else bias[mine]
        x = definition.logits(
            head_rows(hidden, start, block), barrier(barrier((head, i))[0][mine]), own_bias
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
    buffer: jax.Array,
    piece: int,
) -> jax.Array:
    """The buffer [R or more, columns] with the logits of the columns from `start` on."""

    def step(j: jax.Array, buffer: jax.Array) -> jax.Array:
        first = start + j * piece
        own_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, first, piece)
        x = definition.logits(hidden, head_rows(head, first, piece), own_bias)
        return lax.dynamic_update_slice(buffer, x, (jnp.int32(0), j * piece))

    found: jax.Array = lax.fori_loop(0, buffer.shape[1] // piece, step, buffer)
    return found


def read(
    definition: Definition,
    plan: Plan,
    k: int,
    entropy: bool,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    named: jax.Array,
    given: jax.Array,
    inverse: jax.Array | None,
) -> tuple[RowSums, jax.Array]:
    """The sums of all columns, and the logits [R, 1 + C] float32 of named ones.

    Args:
      definition: of the logits.
      plan: columns, piece and part.
      k: how many of the largest, at most W.
      entropy: whether `weighted` is wanted.
      hidden: [R, H].
      head: [W, H].
      bias: [W] or None.
      limit: [] int32: columns from there on are padding.
      named: [R, 1 + C] int32, columns; outside [0, W): 0 is given for their logit.
      given: [R] float32, `given_logits` of the first of them.
      inverse: [R] float32, 1 / T, or None.
    """
    arguments = (hidden, head, bias, limit, named, given, inverse)

    def like(*arguments: jax.Array | None) -> tuple[RowSums, jax.Array]:
        return _nothing(hidden.shape[0], k, entropy, named.shape[1])

    run = functools.partial(_read, definition, plan, k, entropy)
    return lowered_for(
        *arguments,
        like=like,
        cpu=functools.partial(run, True),
        default=functools.partial(run, False),
    )


def _nothing(rows: int, k: int, entropy: bool, named: int) -> tuple[RowSums, jax.Array]:
    return online.nothing(rows, k, entropy), jnp.zeros((rows, named), jnp.float32)


def _read(
    definition: Definition,
    plan: Plan,
    k: int,
    entropy: bool,
    on_cpu: bool,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    named: jax.Array,
    given: jax.Array,
    inverse: jax.Array | None,
) -> tuple[RowSums, jax.Array]:
    rows, width = hidden.shape[0], head.shape[0]
    part = plan.part if on_cpu else rows
    inputs = (hidden, head, bias, limit, named, given, inverse)
    named, given, inverse = (_padded(x, part) for x in (named, given, inverse))
    padded_rows = given.shape[0]

    def read_part(
        x: jax.Array, seen: jax.Array, start: jax.Array, found: tuple[RowSums, jax.Array],
        mine: tuple[jax.Array, jax.Array, jax.Array | None],
    ) -> tuple[RowSums, jax.Array]:  # fmt: skip
        """What is known with the logits x [B, columns] of some rows too."""
        sums, logits = found
        ids, given, inverse = mine
        columns = jnp.arange(plan.columns, dtype=jnp.int32)
        real = (columns >= seen - start) & (columns < limit - start)
        x = barrier(jnp.where(real[None], x, jnp.asarray(-jnp.inf, x.dtype)))
        both = online.joined(sums, online.read(x, given, 0, inverse, entropy), inverse)
        top = online.with_top_k(sums.top_logits, sums.top_ids, x, start, on_cpu)
        here = (ids >= seen) & (ids < start + plan.columns)
        place = jnp.clip(ids - start, 0, plan.columns - 1)
        own = jnp.take_along_axis(x, place, axis=1).astype(jnp.float32)
        return (
            both._replace(top_logits=top[0], top_ids=top[1]),
            jnp.where(here, own, logits),
        )

    def step(
        i: jax.Array, carry: tuple[jax.Array, tuple[RowSums, jax.Array]]
    ) -> tuple[jax.Array, tuple[RowSums, jax.Array]]:
        buffer, found = carry
        seen = i * plan.columns
        start = jnp.minimum(seen, width - plan.columns)  # the last part may begin early
        buffer = filled(definition, hidden, head, bias, start, buffer, plan.piece)
        if part == padded_rows:
            return buffer, read_part(buffer, seen, start, found, (named, given, inverse))

        def some(j: jax.Array, found: tuple[RowSums, jax.Array]) -> tuple[RowSums, jax.Array]:
            def of(x: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(x, j * part, part)

            before, mine = jax.tree.map(of, (found, (named, given, inverse)))
            after = read_part(of(buffer), seen, start, before, mine)
            return jax.tree.map(
                lambda whole, own: lax.dynamic_update_slice_in_dim(whole, own, j * part, 0),
                found,
                after,
            )

        return buffer, lax.fori_loop(0, padded_rows // part, some, found)

    empty = jnp.zeros((padded_rows, plan.columns), definition.logits_dtype)
    first = (empty, _nothing(padded_rows, k, entropy, named.shape[1]))
    trips = -(-width // plan.columns)
    _, found = lax.fori_loop(0, trips, step, vary_like(first, inputs))
    return jax.tree.map(lambda x: x[:rows], found)


def _padded(x: jax.Array | None, part: int) -> jax.Array | None:
    """x [R, ...] with zeros up to a multiple of `part`."""
    if x is None:
        return None
    return jnp.pad(x, ((0, -x.shape[0] % part), *((0, 0),) * (x.ndim - 1)))


def recount(
    definition: Definition,
    plan: Plan,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    given: jax.Array,
) -> jax.Array:
    """How many logits of each row are strictly larger than `given` [R] float32: [R] int32."""
    width = head.shape[0]
    columns = jnp.arange(plan.piece, dtype=jnp.int32)

    def step(i: jax.Array, count: jax.Array) -> jax.Array:
        seen = i * plan.piece
        start = jnp.minimum(seen, width - plan.piece)
        own_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, plan.piece)
        x = definition.logits(hidden, head_rows(head, start, plan.piece), own_bias)
        real = (columns >= seen - start) & (columns < limit - start)
        larger = strictly_larger(x, given[:, None].astype(x.dtype)) & real[None]
        return count + jnp.sum(larger, axis=1, dtype=jnp.int32)

    zeros = vary_like(jnp.zeros(hidden.shape[0], jnp.int32), (hidden, head, bias, limit, given))
    found: jax.Array = lax.fori_loop(0, -(-width // plan.piece), step, zeros)
    return found
