"""What is read of all rows' logits, a part of the vocabulary at a time.

pieces   a few columns of the head are copied and multiplied, into a buffer [R, columns]
parts    some rows of the buffer are read: sums, the logits named, candidates for the top K
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import row_entropy, row_statistics
from pallas_kernels.blocks import barrier, vary_like
from pallas_kernels.linear import candidates, online
from pallas_kernels.linear.columns import filled, logits
from pallas_kernels.linear.definition import Definition, loaded, stored
from pallas_kernels.linear.plan import Plan
from pallas_kernels.linear.types import RowSums
from pallas_kernels.platforms import lowered_for
from pallas_kernels.row_statistics import Given
from pallas_kernels.selection import NARROWEST_GROUP, group_maxima
from pallas_kernels.selection_on_cpu import largest_on_cpu


class State(NamedTuple):
    """What is known of B rows."""

    sums: RowSums  # without its top K
    named: jax.Array  # [B, 1 + C] float32, logits; 0 for those not met
    running: candidates.Running


class Rows(NamedTuple):
    """What is given of B rows."""

    named: jax.Array  # [B, 1 + C] int32, columns
    given: jax.Array  # [B] float32, the first one's logit
    inverse: jax.Array | None  # [B] float32, 1 / T; None: 1


def read(
    definition: Definition,
    plan: Plan,
    k: int,
    entropy: bool,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    limit: jax.Array,
    rows: Rows,
) -> tuple[RowSums, jax.Array]:
    """The sums of all columns, and the logits [R, 1 + C] float32 of those named; else 0.

    Args:
      definition: of the logits.
      plan: columns, piece and part.
      k: how many of the largest, at most W.
      entropy: whether `weighted` is wanted.
      hidden: [R, H].
      head: [W, H], or as the definition says.
      bias: [W] or None.
      limit: [] int32: columns from there on are padding.
      rows: what is given of the R rows.
    """

    def like(*_: jax.Array | None) -> tuple[RowSums, jax.Array]:
        nothing = jnp.zeros(rows.named.shape, jnp.float32)
        return online.nothing(rows.named.shape[0], k, entropy), nothing

    run = functools.partial(_read, definition, plan, k, entropy)
    return lowered_for(
        hidden, head, bias, limit, *rows,
        like=like, cpu=functools.partial(run, True), default=functools.partial(run, False),
    )  # fmt: skip


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
    *of_rows: jax.Array | None,
) -> tuple[RowSums, jax.Array]:
    num_rows, width = hidden.shape[0], definition.width(head)
    part = plan.part if on_cpu else num_rows
    inputs = (hidden, head, bias, limit, of_rows)
    named, given, inverse = (_padded(x, part) for x in of_rows)
    assert named is not None
    assert given is not None
    rows = Rows(named, given, inverse)
    padded = named.shape[0]
    # One product is read where it is, if no row need be added to it.
    direct = plan.piece == plan.columns and padded == num_rows
    room = candidates.room(k, width) if on_cpu else 0

    def read_part(
        x: jax.Array, start: jax.Array, seen: jax.Array, state: State, used: jax.Array, rows: Rows
    ) -> tuple[State, jax.Array]:
        """What is known with the logits x [B, columns] of some rows too."""
        met = _met(x, start, seen, rows.named, state.named)
        if on_cpu:
            sums, maxima = _sums_on_cpu(x, rows, entropy)
            running = state.running
            if k:
                running, used = candidates.appended(running, used, x, maxima, start, k)
        else:
            sums = online.read(x, rows.given, min(k, plan.columns), rows.inverse, entropy)
            running = candidates.merged(state.running, sums.top_logits, sums.top_ids + start, k)
        sums = sums._replace(top_ids=state.sums.top_ids, top_logits=state.sums.top_logits)
        return State(online.joined(state.sums, sums, rows.inverse), met, running), used

    def step(i: jax.Array, carry: Carry) -> Carry:
        buffer, state, used = carry
        seen = i * plan.columns
        start = jnp.minimum(seen, width - plan.columns)  # the last part may begin early
        real, dtype = (seen, limit), definition.logits_dtype
        if direct:
            every = logits(definition, hidden, head, bias, start, real, plan.piece)
        else:
            buffer = filled(definition, hidden, head, bias, start, real, buffer, plan.piece)
            every = buffer
        if part == padded:
            x = every if direct else loaded(every, dtype)
            state, one = read_part(x, start, seen, state, used[0], rows)
            return buffer, state, one[None]

        def some(j: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
            state, used = carry
            x, own_state, own_rows = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, j * part, part), (every, state, rows)
            )
            x = barrier(x) if direct else loaded(barrier(x), dtype)
            after, count = read_part(x, start, seen, own_state, used[j], own_rows)
            state = jax.tree.map(
                lambda whole, own: lax.dynamic_update_slice_in_dim(whole, own, j * part, 0),
                state,
                after,
            )
            return state, used.at[j].set(count)

        return buffer, *lax.fori_loop(0, padded // part, some, (state, used))

    first = (
        stored(jnp.zeros((padded, 0 if direct else plan.columns), definition.logits_dtype)),
        State(
            online.nothing(padded, 0, entropy),
            jnp.zeros(named.shape, jnp.float32),
            candidates.empty(padded, k, room),
        ),
        jnp.zeros(padded // part, jnp.int32),
    )
    trips = -(-width // plan.columns)
    _, state, _ = lax.fori_loop(0, trips, step, vary_like(first, inputs))
    best = _ordered(state.running, k, part)
    sums = state.sums._replace(top_logits=best.logits, top_ids=best.ids)
    found: tuple[RowSums, jax.Array] = jax.tree.map(lambda x: x[:num_rows], (sums, state.named))
    return found


def _ordered(running: candidates.Running, k: int, part: int) -> candidates.Running:
    """The top K of all rows, some at a time."""
    if running.ids.shape[1] == k:
        return running

    def some(j: jax.Array, found: candidates.Running) -> candidates.Running:
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, j * part, part), running)
        updated: candidates.Running = jax.tree.map(
            lambda whole, own: lax.dynamic_update_slice_in_dim(whole, own, j * part, 0),
            found,
            candidates.ordered(own, k),
        )
        return updated

    rows = running.ids.shape[0]
    nothing = vary_like(candidates.empty(rows, k, 0), running)
    found: candidates.Running = lax.fori_loop(0, rows // part, some, nothing)
    return found


Carry = tuple[jax.Array, State, jax.Array]


def _met(
    x: jax.Array, start: jax.Array, seen: jax.Array, named: jax.Array, before: jax.Array
) -> jax.Array:
    """The logits of named columns, with those that are among x's new ones."""
    here = (named >= seen) & (named < start + x.shape[1])
    place = jnp.clip(named - start, 0, x.shape[1] - 1)
    return jnp.where(here, jnp.take_along_axis(x, place, axis=1).astype(jnp.float32), before)


def _sums_on_cpu(x: jax.Array, rows: Rows, entropy: bool) -> tuple[RowSums, jax.Array]:
    """`online.read` without a top K, and the `group_maxima` of x."""
    maxima = group_maxima(x, NARROWEST_GROUP)
    largest = largest_on_cpu(maxima, x.dtype)
    maximum = jnp.where(jnp.isnan(largest), -jnp.inf, largest)
    t = None if rows.inverse is None else 1 / rows.inverse
    reference = jnp.where(largest == -jnp.inf, 0, largest)
    given = Given(reference, rows.given.astype(x.dtype), t)
    sum_exp, num_larger = row_statistics.sums_on_cpu(x, given)
    return (
        online.nothing(x.shape[0], 0, False)._replace(
            maximum=maximum,
            sum_exp=sum_exp,
            num_larger=num_larger,
            weighted=row_entropy.weighted_sum_on_cpu(x, given) if entropy else None,
        ),
        maxima,
    )


def _padded(x: jax.Array | None, part: int) -> jax.Array | None:
    """x [R, ...] with zeros up to a multiple of `part`."""
    if x is None:
        return None
    return jnp.pad(x, ((0, -x.shape[0] % part), *((0, 0),) * (x.ndim - 1)))
