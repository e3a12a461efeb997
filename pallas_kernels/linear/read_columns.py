"""Logits of all rows, a part of the vocabulary at a time: the head is read once, from end to end.

pieces   a few columns of the head are copied and multiplied, into a buffer [R, columns]
parts    some rows of the buffer are read: sums, the logits named, candidates for the top K

Counting larger logits needs the given token's own before its column is met. `given_logits` computes
it beforehand by products of the same shape, of which a matrix unit's bits do not depend on the
other columns. Where they do after all, its real one is known at the end, and `recount` counts
again. So token ranks are always those of the logits in the blocks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import joined_sums
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.backends.xla.rows import Given
from pallas_kernels.backends.xla.selection import NARROWEST_GROUP, group_maxima, largest_on_cpu
from pallas_kernels.contract.rows import Outputs, Rows, RowSums, no_sums
from pallas_kernels.linear import candidates
from pallas_kernels.linear.schedule import Plan
from pallas_kernels.linear.types import Definition, head_rows, loaded, stored
from pallas_kernels.lowering.choose import lowered_for
from pallas_kernels.lowering.forms import (
    barrier,
    in_pairs,
    pieces,
    reduced,
    strictly_larger,
    vary_like,
)

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


class State(NamedTuple):
    """What is known of B rows."""

    sums: RowSums  # without its top K
    named: jax.Array  # [B, 1 + C] float32, logits; 0 for those not met


class RowInputs(NamedTuple):
    """What is given of B rows."""

    named: jax.Array  # [B, 1 + C] int32, columns
    given: jax.Array  # [B] float32, the first one's logit
    temperatures: jax.Array | None  # [B] float32, finite ones above 0; None: 1


def read(
    definition: Definition,
    plan: Plan,
    outputs: Outputs,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    rows: RowInputs,
) -> tuple[RowSums, jax.Array]:
    """The sums of all columns, and the logits [R, 1 + C] float32 of those named; else 0.

    Args:
      definition: of the logits.
      plan: columns, piece and part.
      outputs: K, at most W, and whether `weighted` is wanted.
      hidden: [R, H].
      head: [W, H], or as the definition says.
      bias: [W] or None.
      limit: [] int32: columns from there on are padding.
      rows: what is given of the R rows.
    """

    def like(*_: jax.Array | None) -> tuple[RowSums, jax.Array]:
        nothing = jnp.zeros(rows.named.shape, jnp.float32)
        return no_sums(rows.named.shape[0], outputs), nothing

    run = functools.partial(_read, definition, plan, outputs)
    return lowered_for(
        hidden, head, bias, limit, *rows,
        like=like, cpu=functools.partial(run, True), default=functools.partial(run, False),
    )  # fmt: skip


def _read(
    definition: Definition,
    plan: Plan,
    outputs: Outputs,
    on_cpu: bool,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    *of_rows: jax.Array | None,
) -> tuple[RowSums, jax.Array]:
    num_rows, width, k = hidden.shape[0], definition.width(head), outputs.k
    part = plan.part if on_cpu else num_rows
    if plan.elsewhere and not on_cpu:
        plan = plan._replace(columns=plan.elsewhere, piece=plan.elsewhere)
    inputs = (hidden, head, bias, limit, of_rows)
    named, given, temperatures = (_padded(x, part) for x in of_rows)
    assert named is not None
    assert given is not None
    rows = RowInputs(named, given, temperatures)
    padded = named.shape[0]
    # One product is read where it is, if no row need be added to it.
    direct = plan.piece == plan.columns and padded == num_rows

    def read_part(
        x: jax.Array, start: jax.Array, seen: jax.Array, state: State, rows: RowInputs
    ) -> tuple[State, Best]:
        """What is known with the logits x [B, columns] of some rows too."""
        met = _met(x, start, seen, rows.named, state.named)
        t = rows.temperatures
        if on_cpu:
            sums = _sums_on_cpu(x, rows, outputs.entropy)
        else:
            some = outputs._replace(k=min(outputs.k, plan.columns))
            sums = xla.row_sums(Rows(x, temperatures=t), rows.given, some)
        best = (sums.top_logits, sums.top_ids + start)
        sums = sums._replace(top_ids=state.sums.top_ids, top_logits=state.sums.top_logits)
        both: RowSums = jax.tree.map(lambda a, b: jnp.stack([a, b]), state.sums, sums)
        return State(joined_sums(both, t), met), best

    def step(i: jax.Array, carry: Carry) -> Carry:
        buffer, state, running = carry
        seen = i * plan.columns
        start = jnp.minimum(seen, width - plan.columns)  # the last part may begin early
        real, dtype = (seen, limit), definition.logits_dtype
        if direct:
            every = logits(definition, hidden, head, bias, start, real, plan.piece)
        else:
            buffer = filled(definition, hidden, head, bias, start, real, buffer, plan.piece)
            every = buffer

        def some(j: jax.Array, state: State) -> State:
            x, own_state, own_rows = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, j * part, part), (every, state, rows)
            )
            x = barrier(x) if direct else loaded(barrier(x), dtype)
            updated: State = jax.tree.map(
                lambda whole, own: lax.dynamic_update_slice_in_dim(whole, own, j * part, 0),
                state,
                read_part(x, start, seen, own_state, own_rows)[0],
            )
            return updated

        if part == padded:
            x = every if direct else loaded(every, dtype)
            state, best = read_part(x, start, seen, state, rows)
            if not isinstance(running, candidates.Running):
                running = candidates.merged(running, *best, k)
        else:
            state = lax.fori_loop(0, padded // part, some, state)
        if isinstance(running, candidates.Running):
            x = every if direct else loaded(barrier(every), dtype)
            running = candidates.appended(running, x, start, k)
        return buffer, state, running

    nothing = (jnp.full((padded, k), -jnp.inf, jnp.float32), jnp.zeros((padded, k), jnp.int32))
    first = (
        stored(jnp.zeros((padded, 0 if direct else plan.columns), definition.logits_dtype)),
        State(no_sums(padded, outputs._replace(k=0)), jnp.zeros(named.shape, jnp.float32)),
        candidates.empty(padded, k, plan.room) if on_cpu and k else nothing,
    )
    trips = -(-width // plan.columns)
    _, state, running = lax.fori_loop(0, trips, step, vary_like(first, inputs))
    found_best = candidates.ordered(running, k) if on_cpu and k else running
    sums = state.sums._replace(top_logits=found_best[0], top_ids=found_best[1])
    found: tuple[RowSums, jax.Array] = jax.tree.map(lambda x: x[:num_rows], (sums, state.named))
    return found


Best = tuple[jax.Array, jax.Array]  # logits [B, K] float32, and ids [B, K] int32

Carry = tuple[jax.Array, State, candidates.Running | Best]


def _met(
    x: jax.Array, start: jax.Array, seen: jax.Array, named: jax.Array, before: jax.Array
) -> jax.Array:
    """The logits of named columns, with those that are among x's new ones."""
    here = (named >= seen) & (named < start + x.shape[1])
    place = jnp.clip(named - start, 0, x.shape[1] - 1)
    return jnp.where(here, jnp.take_along_axis(x, place, axis=1).astype(jnp.float32), before)


def _sums_on_cpu(x: jax.Array, rows: RowInputs, entropy: bool) -> RowSums:
    """`xla.row_sums` without a top K."""
    largest = largest_on_cpu(group_maxima(x, NARROWEST_GROUP), x.dtype)
    maximum = jnp.where(jnp.isnan(largest), -jnp.inf, largest)
    reference = jnp.where(largest == -jnp.inf, 0, largest)
    given = Given(reference, rows.given.astype(x.dtype), rows.temperatures)
    sum_exp, num_larger = xla.sums_on_cpu(x, given)
    return no_sums(x.shape[0], Outputs(0))._replace(
        maximum=maximum,
        sum_exp=sum_exp,
        num_larger=num_larger,
        weighted=xla.weighted_sum_on_cpu(x, given) if entropy else None,
    )


def _padded(x: jax.Array | None, part: int) -> jax.Array | None:
    """x [R, ...] with zeros up to a multiple of `part`."""
    if x is None:
        return None
    return jnp.pad(x, ((0, -x.shape[0] % part), *((0, 0),) * (x.ndim - 1)))
