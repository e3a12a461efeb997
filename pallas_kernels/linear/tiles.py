"""Rows in tiles: a row's logprobs have the same bits in every call and on every mesh.

A product of another number of rows or columns may add in another order. Here all products have one
shape, so many rows by `COLUMNS` of the head, and what is read of their logits are the groups of
256 tokens, whose sums no split can change (`backends/row_totals.py`). It is `topk_logprobs` of
these logits, of one tile of rows after another.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.groups import WIDTH, RowPart
from pallas_kernels.backends.row_totals import inverse_of, joined
from pallas_kernels.backends.xla.rows import sums_of_part
from pallas_kernels.backends.xla.tails import (
    FOLLOWING,
    columns_of_all,
    following_columns,
    tail_of,
    with_following,
)
from pallas_kernels.contract.rows import RowSums
from pallas_kernels.linear.read_columns import ColumnSums
from pallas_kernels.linear.types import Call, Definition, LinearInputs, head_rows, loaded, stored
from pallas_kernels.lowering import forms, typed
from pallas_kernels.meshes.placement import WHOLE

COLUMNS = 2048  # of the head, of one product
RowArrays = TypeVar("RowArrays", bound=forms.Tree)
Results = TypeVar("Results", bound=forms.Tree)


def over_tiles(
    tile: int,
    function: Callable[[RowArrays, jax.Array], Results],
    rows: RowArrays,
    num_rows: jax.Array | None = None,
) -> Results:
    """`function` of one tile of rows after another, put together.

    Args:
      tile: rows at a time; fewer are filled up with the last one.
      function: of a tree of arrays [tile, ...] and of the row that it begins with, [] int32.
        Returns another one, the same on every vocabulary shard.
      rows: a tree of arrays [R, ...].
      num_rows: [] int32; results from there on are zeros. None: R.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    number = max(count, tile)

    def filled(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, number - count), *((0, 0),) * (x.ndim - 1)), mode="edge")

    padded = jax.tree.map(filled, rows)

    def work(start: jax.Array) -> Results:
        tile_rows = forms.barrier(forms.rows_from(padded, start, tile))
        return forms.barrier(function(tile_rows, start))

    types = jax.eval_shape(work, jnp.int32(0))
    empty = jax.tree.map(lambda x: jnp.zeros((number, *x.shape[1:]), x.dtype), types)
    # Every vocabulary shard has the same results: they vary with the rows alone.
    results: Results = forms.map_blocks(work, tile, num_rows, empty, padded)
    return typed.tree_map(lambda x: x[:count], results)


def read_in_tiles(call: Call, inputs: LinearInputs, named: jax.Array) -> ColumnSums:
    """The sums of R rows, read tile by tile.

    Args:
      call: with a `row_tile`.
      inputs: temperatures are usable ones.
      named: [R, 1 + C] int32, the given token and the extra ids.
    """
    tile, row_ids = call.row_tile, inputs.row_ids
    assert tile is not None

    def of_tile(rows: Any, start: jax.Array) -> ColumnSums:
        hidden, temperatures, ids = rows
        if row_ids is not None:
            hidden = forms.pin_to_iteration(inputs.hidden, start).at[hidden].get(mode="clip")
        x = logits_of_tile(call, forms.barrier(hidden), inputs.head, inputs.bias, start)
        logits = call.shard.named_logits(x, jnp.arange(tile, dtype=jnp.int32), ids)
        return ColumnSums(sums_of_tile(call, x, logits[:, 0], temperatures), logits)

    rows = inputs.hidden if row_ids is None else row_ids, inputs.temperatures, named
    return over_tiles(tile, of_tile, rows, inputs.num_rows)


def logits_of_tile(
    call: Call, hidden: jax.Array, head: jax.Array, bias: jax.Array | None, start: jax.Array
) -> jax.Array:
    """The logits [tile, W] of hidden [tile, H], by products with `COLUMNS` of the head's tokens.

    Padding is -inf. start: [] int32, which the rows begin with: the head is read for this trip
    alone.
    """
    definition = call.definition
    width, axis = definition.width(head), definition.axis
    missing = max(COLUMNS - width, 0)  # of a narrow head, which is filled up
    if missing:
        padding = [(0, 0), (0, 0)]
        padding[axis] = (0, missing)
        head = jnp.pad(forms.pin_to_iteration(head, start), padding)
        bias = None if bias is None else jnp.pad(bias, (0, missing))
    columns = width + missing

    def fill(i: jax.Array, buffer: jax.Array) -> jax.Array:
        begin = jnp.minimum(i * COLUMNS, columns - COLUMNS)  # the last one may begin early
        own_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, begin, COLUMNS)
        x = _product(definition, hidden, head_rows(head, begin, COLUMNS, axis), own_bias)
        return lax.dynamic_update_slice(buffer, stored(x), (jnp.int32(0), begin))

    dtype = definition.logits_dtype
    buffer = stored(jnp.zeros((hidden.shape[0], columns), dtype))
    buffer = forms.vary_like(buffer, (hidden, head, bias))
    # How many trips there are is hidden: of one alone XLA would make no loop, and of the columns
    # that are cut off no numbers; it takes tanh of fewer in another way.
    trips = forms.barrier(jnp.int32(-(-columns // COLUMNS)))
    x = loaded(lax.fori_loop(0, trips, fill, buffer), dtype)[:, :width]
    return forms.barrier(call.shard.masked(x))


def _product(
    definition: Definition, hidden: jax.Array, head: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """One product's logits; fused with what stands around it, it might round at other places."""
    return forms.barrier(definition.logits(*forms.barrier((hidden, head, bias))))


def sums_of_tile(
    call: Call, x: jax.Array, selected: jax.Array, temperatures: jax.Array | None
) -> RowSums:
    """The sums of whole rows, by the groups of this device's columns x [tile, W].

    selected: [tile] float32, the given tokens' logits.
    """
    shard, width = call.shard, x.shape[1]
    vocab_size = shard.size(width)
    if shard.axis_name is not None and width < WIDTH:
        x, shard, width = columns_of_all(x, shard), WHOLE, vocab_size
    elif shard.axis_name is None:
        x, width = x[:, :vocab_size], vocab_size
    part = RowPart(x, tail_of(x), jnp.int32(0))
    if shard.axis_name is not None and width % WIDTH:
        following = following_columns(x[:, :FOLLOWING], width, shard)
        part = with_following(x, following, (-shard.ids(width)[0] % WIDTH).astype(jnp.int32))
    outputs = call.outputs._replace(k=min(call.k, width))
    sums = sums_of_part(part, selected, outputs, temperatures)
    return joined(sums, inverse_of(temperatures, x.shape[0]), call.k, vocab_size, shard, width)
