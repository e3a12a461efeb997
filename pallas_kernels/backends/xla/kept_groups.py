"""The groups of the tokens that rows keep, where they keep more than their read's candidates.

What is kept is said by a cut, a place in the descending order of tokens, or by a gap, how far below
the row's largest logit a token may be. `group_sums` says what a group's sum is.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.backends.groups import (
    WIDTH,
    GroupSums,
    Part,
    columns_of_groups,
    keeps,
    whole_groups,
)
from pallas_kernels.backends.xla import block_sizes, group_sums
from pallas_kernels.backends.xla.groups import LISTED, Size, in_blocks
from pallas_kernels.contract.changes import Changes
from pallas_kernels.lowering.platforms import lowered_for

# Rows of `sums_within` that a GPU copies at a time: the kernels do without any other such block.
FLAT_ROWS = 8


class KeptGroups(NamedTuple):
    """The groups [R, G] of the kept tokens, and how small their logits are."""

    maxima: Float32[Array, "R G"]
    sums: Float32[Array, "R G"]  # 0 where a group keeps nothing
    least: Float32[Array, "R G"]  # the smallest kept logit; inf where a group keeps nothing


Outputs = TypeVar("Outputs", GroupSums, KeptGroups)


def kept_sums(
    part: Part,
    first_id: Int32[Array, ""],
    cut: tuple[Float32[Array, " R"], Int32[Array, " R"]],
    inverse: Float32[Array, " R"],
    row_ids: Int32[Array, " R"],
    num_rows: Int32[Array, ""],
    changes: Changes | None = None,
) -> GroupSums:
    """The groups of the tokens that a cut keeps, of the rows `row_ids`; 0 from `num_rows` on.

    Args:
      part: the logits.
      first_id: the token id of the first group's first token.
      cut: a logit and an id: kept are larger logits, equal ones with a smaller id, and that id.
      inverse: of the R rows.
      row_ids: the row of each.
      num_rows: how many rows count.
      changes: of the part's logits, but not of its tail.
    """
    arguments = (*part, first_id, *cut, inverse, row_ids, num_rows)
    return _lowered(_kept_sums, _like_kept, changes, arguments)


def sums_within(
    part: Part,
    gap: tuple[Float32[Array, " R"], Float32[Array, " R"]],
    inverse: Float32[Array, " R"],
    row_ids: Int32[Array, " R"],
    num_rows: Int32[Array, ""],
    changes: Changes | None = None,
) -> KeptGroups:
    """The groups of the tokens that are not too far below the row's largest logit.

    Args:
      part, inverse, row_ids, num_rows, changes: as for `kept_sums`.
      gap: m, and the least x - m that is kept.
    """
    arguments = (*part, *gap, inverse, row_ids, num_rows)
    return _lowered(_sums_within, _like_within, changes, arguments)


def _lowered(
    call: Callable[..., Outputs],
    like: Callable[..., Outputs],
    changes: Changes | None,
    arguments: tuple[jax.Array, ...],
) -> Outputs:
    """call(size, changes, *arguments), with the size of a CPU's blocks or of another device's."""
    cpu, default = (
        functools.partial(call, size) for size in (block_sizes.rows_on_cpu, block_sizes.rows_on_gpu)
    )
    return lowered_for(
        changes, *arguments, like=lambda _, *own: like(*own), cpu=cpu, default=default
    )


def _kept_sums(size: Size, changes: Changes | None, *arguments: jax.Array) -> GroupSums:
    part = Part(*arguments[:3])
    first_id, cut_logit, cut_id, inverse, row_ids, num_rows = arguments[3:]

    def work(
        x: jax.Array, tail: jax.Array, logit: jax.Array, last: jax.Array, inverse: jax.Array
    ) -> GroupSums:
        def kept(x: jax.Array, first: jax.Array) -> jax.Array:
            ids = (first + jnp.arange(x[0].size, dtype=jnp.int32)).reshape(1, *x.shape[1:])
            return keeps(x, ids, _beside(logit, x), _beside(last, x))

        grouped = columns_of_groups(Part(x, tail, part.offset))
        parts = (grouped, first_id), (tail, first_id + whole_groups(part) * WIDTH)
        masked = [jnp.where(kept(x, first), x, -jnp.inf) for x, first in parts]
        return group_sums.of_block(masked[0], masked[1], inverse)

    rows = cut_logit, cut_id, inverse
    initial = _like_kept(*arguments)
    return _of_listed(work, size, part, changes, rows, initial, row_ids, num_rows)


def _sums_within(size: Size, changes: Changes | None, *arguments: jax.Array) -> KeptGroups:
    part = Part(*arguments[:3])
    largest, lowest, inverse, row_ids, num_rows = arguments[3:]

    def work(
        x: jax.Array, tail: jax.Array, largest: jax.Array, lowest: jax.Array, inverse: jax.Array
    ) -> KeptGroups:
        def kept(x: jax.Array) -> jax.Array:
            value = x.astype(jnp.float32)
            return (value - _beside(largest, x) >= _beside(lowest, x)) & (value > -jnp.inf)

        parts = columns_of_groups(Part(x, tail, part.offset)), tail
        masked = [jnp.where(kept(x), x, -jnp.inf) for x in parts]
        found = group_sums.of_block(masked[0], masked[1], inverse)
        # The largest of the negated logits; what is not kept is -inf on either side.
        negated = [jnp.where(kept(x), -x, -jnp.inf) for x in parts]
        return KeptGroups(*found, -group_sums.maxima_of_block(*negated))

    rows = largest, lowest, inverse
    initial = _like_within(*arguments)
    return _of_listed(work, size, part, changes, rows, initial, row_ids, num_rows, FLAT_ROWS)


def _of_listed(
    work: Callable[..., Outputs],
    size: Size,
    part: Part,
    changes: Changes | None,
    rows: tuple[jax.Array, ...],
    initial: Outputs,
    row_ids: jax.Array,
    num_rows: jax.Array,
    listed: int = LISTED,
) -> Outputs:
    """`work(x, tail, *rows)` of the listed rows, a block at a time."""
    given = part.tail.at[row_ids].get(mode="clip"), *rows
    return in_blocks(work, size, part.logits, given, initial, 0, row_ids, num_rows, listed, changes)


def _beside(values: jax.Array, x: jax.Array) -> jax.Array:
    """A value of each row [R], to go with x [R, ...]."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


def _shape(part: Part, row_ids: jax.Array) -> tuple[int, int]:
    return len(row_ids), whole_groups(part) + part.tail.shape[1]


def _like_kept(*arguments: jax.Array) -> GroupSums:
    zeros = jnp.zeros(_shape(Part(*arguments[:3]), arguments[-2]), jnp.float32)
    return GroupSums(zeros, zeros)


def _like_within(*arguments: jax.Array) -> KeptGroups:
    zeros = jnp.zeros(_shape(Part(*arguments[:3]), arguments[-2]), jnp.float32)
    return KeptGroups(zeros, zeros, zeros)
