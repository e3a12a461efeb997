"""The groups of the tokens that min-p keeps, where it keeps more than a read's candidates.

They are those whose logits are not too far below the row's largest. `group_sums` says what a
group's sum is.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.backends.groups import Part, columns_of_groups, whole_groups
from pallas_kernels.backends.xla import group_sums, rows
from pallas_kernels.backends.xla.groups import Size, in_blocks
from pallas_kernels.contract.changes import Changes
from pallas_kernels.lowering.choose import lowered_for

# Rows that a GPU copies at a time: the kernels do without any other such block.
FLAT_ROWS = 8


class KeptGroups(NamedTuple):
    """The groups [R, G] of the kept tokens, and how small their logits are."""

    maxima: Float32[Array, "R G"]
    sums: Float32[Array, "R G"]  # 0 where a group keeps nothing
    least: Float32[Array, "R G"]  # the smallest kept logit; inf where a group keeps nothing


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
      part: the logits.
      gap: m, and the least x - m that is kept.
      inverse: of the R rows.
      row_ids: the row of each.
      num_rows: how many rows count; from there on, all is 0.
      changes: of the part's logits, but not of its tail.
    """

    cpu, default = (
        functools.partial(_sums_within, size) for size in (rows.rows_on_cpu, rows.rows_on_gpu)
    )
    arguments = part, *gap, inverse, row_ids, num_rows, changes
    return lowered_for(*arguments, like=_like, cpu=cpu, default=default)


def _like(part: Part, largest: jax.Array, *_: jax.Array | Changes | None) -> KeptGroups:
    shape = len(largest), whole_groups(part) + part.tail.shape[1]
    return KeptGroups(*(jnp.zeros(shape, jnp.float32),) * 3)


def _sums_within(
    size: Size,
    part: Part,
    largest: jax.Array,
    lowest: jax.Array,
    inverse: jax.Array,
    row_ids: jax.Array,
    num_rows: jax.Array,
    changes: Changes | None,
) -> KeptGroups:
    def work(
        x: jax.Array, tail: jax.Array, largest: jax.Array, lowest: jax.Array, inverse: jax.Array
    ) -> KeptGroups:
        def kept(x: jax.Array) -> jax.Array:
            value = x.astype(jnp.float32)
            m, least = (one.reshape(-1, *[1] * (x.ndim - 1)) for one in (largest, lowest))
            return (value - m >= least) & (value > -jnp.inf)

        parts = columns_of_groups(Part(x, tail, part.offset)), tail
        masked = [jnp.where(kept(x), x, -jnp.inf) for x in parts]
        found = group_sums.of_block(masked[0], masked[1], inverse)
        # The largest of the negated logits; what is not kept is -inf on either side.
        negated = [jnp.where(kept(x), -x, -jnp.inf) for x in parts]
        return KeptGroups(*found, -group_sums.maxima_of_block(*negated))

    initial = _like(part, largest)
    rows = part.tail.at[row_ids].get(mode="clip"), largest, lowest, inverse
    return in_blocks(
        work, size, part.logits, rows, initial, 0, row_ids, num_rows, FLAT_ROWS, changes
    )
