"""Sums of rows by XLA's own reductions, for GPUs and TPUs, where no order of theirs is promised.

On a CPU `rows.py` adds up groups. Elsewhere kernels read the rows (`backends/mosaic_gpu`,
`backends/mosaic_tpu`), and this where they cannot: one read on a GPU, and two reductions of which
the compiler makes one read on a TPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.row_totals import LEAST, inverse_of
from pallas_kernels.backends.xla import selection
from pallas_kernels.contract.rows import Outputs, RowSums
from pallas_kernels.lowering import row_pieces
from pallas_kernels.numbers import ordered_keys

Sums = tuple[jax.Array, jax.Array]  # see `statistics_on_tpu`
# The first and last of `RowSums`.
RowStatistics = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


class BlockInputs(NamedTuple):
    """What is known of each row, [B]."""

    reference: jax.Array  # float32, subtracted before `exp`: the row's maximum, or 0
    selected: jax.Array  # of the logits' dtype, the given token's logit
    temperatures: jax.Array | None  # float32, usable ones; None: 1


def statistics_on_tpu(x: jax.Array, row_inputs: BlockInputs) -> Sums:
    """The sum of exponentials [B] float32 and the number of larger logits [B] int32 of x [B, V].

    As two reductions of float32, of which the TPU compiler makes one read. A reduction of both at
    once takes up to twice its cycles, and comparisons of 16 bits half more.
    """
    with jax.named_scope("row_statistics"):
        row_inputs = row_inputs._replace(selected=row_inputs.selected.astype(jnp.float32))
        exponentials = jnp.sum(_exponentials(x, row_inputs), axis=1)
        larger = jnp.sum(_larger(x.astype(jnp.float32), row_inputs), axis=1)
        return exponentials, larger.astype(jnp.int32)


def _exponentials(x: jax.Array, row_inputs: BlockInputs) -> jax.Array:
    """float32 [..., V] of x [..., V] and `row_inputs` [...]."""
    return jnp.exp(_scaled(x, row_inputs))


def _scaled(x: jax.Array, row_inputs: BlockInputs) -> jax.Array:
    """(x - reference) / T, float32 [..., V]."""
    scaled = x.astype(jnp.float32) - row_inputs.reference[..., None]
    if row_inputs.temperatures is not None:
        # A product is enough inside a sum of exponentials; `answers` divides.
        scaled = scaled * inverse_of(row_inputs.temperatures, x.shape[0])[..., None]
    return scaled


def _larger(x: jax.Array, row_inputs: BlockInputs) -> jax.Array:
    """1 where a logit of x [..., V] is larger than the given one [...], else 0, in float32.

    Counted in float32 (exact below 2**24): on a CPU several times faster than in int32.
    """
    larger = ordered_keys.strictly_larger(x, row_inputs.selected[..., None])
    return jnp.where(larger, jnp.float32(1), jnp.float32(0))


def weighted_sum(x: jax.Array, row_inputs: BlockInputs) -> jax.Array:
    """[B] float32 of x [B, V]."""
    with jax.named_scope("row_entropy"):
        terms = _terms(x, row_inputs)
        total: jax.Array = lax.reduce(terms, jnp.float32(0), lax.add, dimensions=(1,))
        return total


def _terms(x: jax.Array, row_inputs: BlockInputs) -> jax.Array:
    """float32 [..., V] of x [..., V] and `row_inputs` [...]."""
    scaled = _scaled(x, row_inputs)
    return jnp.exp(scaled) * jnp.maximum(scaled, jnp.float32(LEAST))


class RowParts(NamedTuple):
    """Of some logits of a row: what `_joined` makes one of two of."""

    keys: jax.Array  # `ordered_keys`; the largest
    largest: jax.Array  # float32
    sums: jax.Array  # float32: of exponentials of differences from the largest one, over T
    larger: jax.Array  # float32: how many are larger than the given token's
    inverse: jax.Array  # float32: 1 / T
    weighted: jax.Array | None  # float32: of these by their exponents, for the entropy


def _joined(a: RowParts, b: RowParts) -> RowParts:
    """Two parts of a row as one."""
    apart = jnp.where(a.largest == b.largest, jnp.float32(0), jnp.abs(a.largest - b.largest))
    inverse = jnp.maximum(a.inverse, b.inverse)
    moved = -apart * inverse
    factor, a_leads = jnp.exp(moved), a.largest >= b.largest

    def both(
        of_leader: jax.Array, other: jax.Array, lead_of: jax.Array, rest: jax.Array
    ) -> jax.Array:
        return jnp.where(a_leads, of_leader, other) + jnp.where(a_leads, rest, lead_of) * factor

    weighted = None
    if a.weighted is not None and b.weighted is not None:
        least = jnp.maximum(moved, jnp.float32(LEAST))
        of_a, of_b = a.weighted + least * a.sums, b.weighted + least * b.sums
        weighted = both(a.weighted, b.weighted, of_a, of_b)
    return RowParts(
        jnp.maximum(a.keys, b.keys),
        jnp.maximum(a.largest, b.largest),
        both(a.sums, b.sums, a.sums, b.sums),
        a.larger + b.larger,
        inverse,
        weighted,
    )


def in_one_read(
    x: jax.Array,
    limit: jax.Array,
    temperatures: jax.Array | None,
    width: int | None,
    entropy: bool,
) -> tuple[RowStatistics, jax.Array | None]:
    """The statistics of rows x [B, V], and the keys of groups of a width, if there is one.

    Sums are relative to the largest logit so far, so they need no maximum that is known before: one
    exponential a logit, and one read. XLA makes two reads of sums behind a maximum.
    """
    rows, vocabulary = x.shape
    width = width or vocabulary
    padded_width = -(-vocabulary // width) * width
    x = row_pieces.filled(x, padded_width, jnp.asarray(-jnp.inf, x.dtype))
    values = x.astype(jnp.float32)
    inverse = inverse_of(temperatures, rows)
    row_inputs = BlockInputs(jnp.zeros((rows,), jnp.float32), limit, None)
    parts = RowParts(
        ordered_keys.ordered_keys(x),
        values,
        jnp.where(values == -jnp.inf, jnp.float32(0), jnp.float32(1)),
        _larger(x, row_inputs),
        jnp.broadcast_to(inverse[:, None], x.shape),
        jnp.zeros_like(values) if entropy else None,
    )
    least, zero = jnp.float32(-jnp.inf), jnp.float32(0)
    empty_part = RowParts(
        ordered_keys.key_of(-jnp.inf, x.dtype), least, zero, zero, zero, zero if entropy else None
    )
    with jax.named_scope("row_statistics"):
        tree = jax.tree.structure(parts)

        def reduced(parts: RowParts) -> RowParts:
            def join(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                first, second = (jax.tree.unflatten(tree, x) for x in (a, b))
                return tuple(jax.tree.leaves(_joined(first, second)))

            axis = jax.tree.leaves(parts)[0].ndim - 1
            leaves, start = (tuple(jax.tree.leaves(x)) for x in (parts, empty_part))
            totals: RowParts = jax.tree.unflatten(tree, lax.reduce(leaves, start, join, (axis,)))
            return totals

        groups = reduced(jax.tree.map(lambda y: y.reshape(rows, -1, width), parts))
        statistics = reduced(groups)
    maxima = groups.keys if width < vocabulary else None
    larger = statistics.larger.astype(jnp.int32)
    return (statistics.largest, statistics.sums, larger, statistics.weighted), maxima


def read_on_tpu(
    x: jax.Array, limit: jax.Array, temperatures: jax.Array | None, width: int | None, entropy: bool
) -> tuple[RowStatistics, None]:
    """`in_one_read` without groups: a TPU would read them in a loop of R * K trips."""
    maximum = selection.row_maximum(x)
    row_inputs = _row_inputs(maximum, limit, temperatures)
    weighted = weighted_sum(x, row_inputs) if entropy else None
    return (maximum, *statistics_on_tpu(x, row_inputs), weighted), None


def _row_inputs(
    maximum: jax.Array, limit: jax.Array, temperatures: jax.Array | None
) -> BlockInputs:
    reference = jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)
    return BlockInputs(reference, limit, temperatures)


def sums_on_gpu(
    x: jax.Array, selected: jax.Array, outputs: Outputs, temperatures: jax.Array | None
) -> RowSums:
    """The sums of a block of rows x [B, V]; selected [B] is the given token's logit.

    x may be a part of longer rows: a row of it that has -inf alone gives a sum of 0.
    """
    width = selection.group_width(x.shape[1], outputs.k)
    limit = ordered_keys.limit_of_count(selected.astype(x.dtype), outputs.inclusive)
    (maximum, sums, larger, weighted), maxima = in_one_read(
        x, limit, temperatures, width, outputs.entropy
    )
    top = selection.select_top_k(x, maxima, outputs.k, width, selection.from_groups)
    return RowSums(maximum, sums, larger, *top, weighted)


def sums_on_tpu(
    x: jax.Array, selected: jax.Array, outputs: Outputs, temperatures: jax.Array | None
) -> RowSums:
    """`sums_on_gpu` by other reductions: a TPU reads chosen groups in a loop of R * K trips."""
    limit = ordered_keys.limit_of_count(selected.astype(x.dtype), outputs.inclusive)
    (maximum, sums, larger, weighted), _ = read_on_tpu(
        x, limit, temperatures, None, outputs.entropy
    )
    top = selection.select_top_k(x, None, outputs.k, None, None)
    return RowSums(maximum, sums, larger, *top, weighted)
