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

from pallas_kernels.backends.answers import SumRows, joined_sums
from pallas_kernels.contract.rows import Outputs, Rows, RowSums, no_sums
from pallas_kernels.linear import candidates
from pallas_kernels.linear.schedule import LinearSchedule
from pallas_kernels.linear.types import Definition, head_rows, loaded, stored
from pallas_kernels.lowering import forms, row_pieces, typed
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.numbers import ordered_keys

GIVEN = 64  # columns of a product: as few as have the bits of more


class Product(NamedTuple):
    """The factors of a device's logits."""

    hidden: jax.Array  # [R, H]
    head: jax.Array  # [W, H], or as the definition says
    bias: jax.Array | None  # [W]
    limit: jax.Array  # [] int32: columns from there on are padding


def given_logits(definition: Definition, product: Product, columns: jax.Array) -> jax.Array:
    """The logit [R] float32 of one column each, by the diagonals of products of a few columns.

    columns: [R] int32 in [0, W).
    """
    hidden, head, bias, _ = product
    rows = hidden.shape[0]
    block = min(GIVEN, rows)
    padded = jnp.pad(columns, (0, GIVEN))

    def work(start: jax.Array) -> jax.Array:
        start = jnp.minimum(start, rows - block)
        columns_of_rows = lax.dynamic_slice_in_dim(padded, start, GIVEN)
        x = definition.logits(
            head_rows(hidden, start, block),
            forms.barrier(
                jnp.take(forms.pin_to_iteration(head, start), columns_of_rows, definition.axis)
            ),
            None if bias is None else bias[columns_of_rows],
        )
        diagonal: jax.Array = jnp.diagonal(x[:, :block])
        return diagonal.astype(jnp.float32)

    inputs = (hidden, head, bias, columns)
    return forms.map_blocks(work, block, None, jnp.zeros(rows, jnp.float32), inputs)


def column_logits(
    definition: Definition, product: Product, first: jax.Array, seen: jax.Array, piece: int
) -> jax.Array:
    """The logits [R, piece] of the columns from `first` on; -inf before `seen`, and of padding."""
    hidden, head, bias, limit = product
    own_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, first, piece)
    x = definition.logits(hidden, head_rows(head, first, piece, definition.axis), own_bias)
    columns = first + jnp.arange(piece, dtype=jnp.int32)
    inside = (columns >= seen) & (columns < limit)
    return jnp.where(inside[None], x, jnp.asarray(-jnp.inf, x.dtype))


def recount(definition: Definition, piece: int, product: Product, selected: jax.Array) -> jax.Array:
    """How many logits of each row are strictly larger than `selected` [R] float32: [R] int32."""
    width = definition.width(product.head)

    def step(i: jax.Array, count: jax.Array) -> jax.Array:
        seen = i * piece
        x = column_logits(definition, product, jnp.minimum(seen, width - piece), seen, piece)
        than = selected[:, None].astype(x.dtype)
        return count + row_pieces.number_where(
            lambda x: ordered_keys.strictly_larger(x, than), x, -jnp.inf
        )

    zeros = forms.vary_like(jnp.zeros(product.hidden.shape[0], jnp.int32), (product, selected))
    return typed.fori_loop(0, -(-width // piece), step, zeros)


class ColumnSums(NamedTuple):
    """The state of B rows."""

    sums: RowSums  # without its top K
    named: jax.Array  # [B, 1 + C] float32, logits; 0 for those not met


class RowInputs(NamedTuple):
    """The inputs of B rows."""

    named: jax.Array  # [B, 1 + C] int32, columns
    selected: jax.Array  # [B] float32, the first one's logit
    temperatures: jax.Array | None  # [B] float32, finite ones above 0; None: 1


def read_columns(
    definition: Definition,
    schedule: LinearSchedule,
    outputs: Outputs,
    row_sums: SumRows,
    product: Product,
    rows: RowInputs,
) -> ColumnSums:
    """The sums of all columns of R rows, and the logits of those named.

    Args:
      definition: of the logits.
      schedule: columns, piece and part.
      outputs: K, at most W, and whether `weighted` is wanted.
      row_sums: of the logits in a part.
      product: all columns.
      rows: what is given of them.
    """

    def like(_: Product, rows: RowInputs) -> ColumnSums:
        no_logits = jnp.zeros(rows.named.shape, jnp.float32)
        return ColumnSums(no_sums(rows.named.shape[0], outputs), no_logits)

    cpu, default = (
        functools.partial(_read_on, definition, schedule, outputs, row_sums, on_cpu)
        for on_cpu in (True, False)
    )
    return lowered_for(product, rows, like=like, cpu=cpu, default=default)


def _read_on(
    definition: Definition,
    schedule: LinearSchedule,
    outputs: Outputs,
    row_sums: SumRows,
    on_cpu: bool,
    product: Product,
    rows: RowInputs,
) -> ColumnSums:
    inputs, num_rows = (product, rows), product.hidden.shape[0]
    width, k = definition.width(product.head), outputs.k
    part = schedule.part if on_cpu else num_rows
    if schedule.elsewhere and not on_cpu:
        schedule = schedule._replace(columns=schedule.elsewhere, piece=schedule.elsewhere)
    rows = jax.tree.map(lambda x: _padded(x, part), rows)
    padded = rows.named.shape[0]
    # One product is read where it is, if no row need be added to it.
    direct = schedule.piece == schedule.columns and padded == num_rows

    def read_part(
        x: jax.Array, start: jax.Array, seen: jax.Array, state: ColumnSums, rows: RowInputs
    ) -> tuple[ColumnSums, candidates.BestColumns]:
        """The state after the logits x [B, columns] of some rows."""
        met = _met(x, start, seen, rows.named, state.named)
        t = rows.temperatures
        some = outputs._replace(k=0 if on_cpu else min(outputs.k, schedule.columns))
        sums = row_sums(Rows(x, temperatures=t), rows.selected, some)
        best = candidates.BestColumns(sums.top_logits, sums.top_ids + start)
        sums = sums._replace(top_ids=state.sums.top_ids, top_logits=state.sums.top_logits)
        both: RowSums = jax.tree.map(lambda a, b: jnp.stack([a, b]), state.sums, sums)
        return ColumnSums(joined_sums(both, t), met), best

    def step(i: jax.Array, carry: _Carry) -> _Carry:
        buffer, state, running = carry
        seen = i * schedule.columns
        start = jnp.minimum(seen, width - schedule.columns)  # the last part may begin early
        dtype, piece = definition.logits_dtype, schedule.piece
        if direct:
            columns_read = column_logits(definition, product, start, seen, piece)
        else:

            def fill(j: jax.Array, buffer: jax.Array) -> jax.Array:
                x = column_logits(definition, product, start + j * piece, seen, piece)
                return lax.dynamic_update_slice(buffer, stored(x), (jnp.int32(0), j * piece))

            columns_read = buffer = lax.fori_loop(0, schedule.columns // piece, fill, buffer)

        def some(j: jax.Array, state: ColumnSums) -> ColumnSums:
            x, own_state, own_rows = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, j * part, part), (columns_read, state, rows)
            )
            x = forms.barrier(x) if direct else loaded(forms.barrier(x), dtype)
            return typed.tree_map(
                lambda array, values: lax.dynamic_update_slice_in_dim(array, values, j * part, 0),
                state,
                read_part(x, start, seen, own_state, own_rows)[0],
            )

        if part == padded:
            x = columns_read if direct else loaded(columns_read, dtype)
            state, best = read_part(x, start, seen, state, rows)
            if not isinstance(running, candidates.Running):
                running = candidates.merged(running, best, k)
        else:
            state = lax.fori_loop(0, padded // part, some, state)
        if isinstance(running, candidates.Running):
            x = columns_read if direct else loaded(forms.barrier(columns_read), dtype)
            running = candidates.appended(running, x, start, k)
        return buffer, state, running

    none = no_sums(padded, outputs)
    best = candidates.BestColumns(none.top_logits, none.top_ids)
    first = (
        stored(jnp.zeros((padded, 0 if direct else schedule.columns), definition.logits_dtype)),
        ColumnSums(
            no_sums(padded, outputs._replace(k=0)), jnp.zeros(rows.named.shape, jnp.float32)
        ),
        candidates.empty(padded, k, schedule.room) if on_cpu and k else best,
    )
    trips = -(-width // schedule.columns)
    _, state, running = lax.fori_loop(0, trips, step, forms.vary_like(first, inputs))
    best = candidates.ordered(running, k) if isinstance(running, candidates.Running) else running
    sums = state.sums._replace(top_logits=best.logits, top_ids=best.ids)
    return typed.tree_map(lambda x: x[:num_rows], ColumnSums(sums, state.named))


_Carry = tuple[jax.Array, ColumnSums, candidates.Running | candidates.BestColumns]


def _met(
    x: jax.Array, start: jax.Array, seen: jax.Array, named: jax.Array, before: jax.Array
) -> jax.Array:
    """The logits of named columns, with those that are among x's new ones."""
    is_met = (named >= seen) & (named < start + x.shape[1])
    place = jnp.clip(named - start, 0, x.shape[1] - 1)
    return jnp.where(is_met, jnp.take_along_axis(x, place, axis=1).astype(jnp.float32), before)


def _padded(x: jax.Array, part: int) -> jax.Array:
    """x [R, ...] with zeros up to a multiple of `part`."""
    return jnp.pad(x, ((0, -x.shape[0] % part), *((0, 0),) * (x.ndim - 1)))
