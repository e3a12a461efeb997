"""What verification knows of the slots before it reads a row, and where their rows are.

Engines batch ragged slots without padding between them: the rows of one slot follow those of
another, and what is left of a bucket follows the last. Nothing here reads a row of logits.
"""

from typing import Annotated, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.sampling.parameters import Sampling, of_each_row
from pallas_kernels.sampling.row_read import RowRead
from pallas_kernels.sampling.types import Drafts, slots_of_rows

Values = TypeVar("Values")


class Batch(NamedTuple):
    """What verification knows of the slots before it reads a row."""

    positions: Int32[Array, "B S"]  # the sequence position that each row decides
    proposed: Bool[Array, "B D"]  # the drafts that there are, and that have a row
    drafts: Drafts
    sampling: Sampling
    row_ids: Int32[Array, "B S"] | None = None  # of the N rows; None: B * S rows, slot by slot
    bonus_token_ids: Int32[Array, " B"] | None = None

    def shape_of(self, rows: jax.Array) -> tuple[int, ...]:
        """How results of the N rows are given: [B, S], or [N] where these are flat."""
        return self.positions.shape if self.row_ids is None else (rows.shape[0],)

    @property
    def has_row(self) -> Bool[Array, "B S"]:
        """Which rows there are."""
        if self.row_ids is None:
            return jnp.ones(self.positions.shape, bool)
        return self.row_ids >= 0

    @property
    def rows(self) -> Int32[Array, "B S"]:
        """The number of each row among the N; 0 where there is none."""
        if self.row_ids is None:
            shape = self.positions.shape
            return jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
        return jnp.maximum(self.row_ids, 0)

    def by_slot(self, values: Values) -> Values:
        """A tree of arrays [N, ...] as [B, S, ...]; unspecified where there is no row."""

        def placed(x: jax.Array) -> jax.Array:
            if self.row_ids is None:
                return x.reshape(*self.positions.shape, *x.shape[1:])
            return x[self.rows]

        found: Values = jax.tree.map(placed, values)
        return found

    def of_each_row(self, num_rows: int) -> Annotated[Sampling, "B = N"]:
        """The parameters of the N rows; those of a row that no slot has are greedy."""
        if self.row_ids is None:
            return of_each_row(self.sampling, self.positions.shape)
        slots = slots_of_rows(self.row_ids, num_rows)
        nobody = Sampling.greedy(1)
        each: Sampling = jax.tree.map(
            lambda x, none: jnp.concatenate([x, none])[slots], self.sampling, nobody
        )
        return each

    def with_rows(
        self, row_ids: jax.Array | None, bonus: jax.Array | None, num_rows: int
    ) -> "Batch":
        """The same slots, with rows among `num_rows` flat ones."""
        if row_ids is None:
            return self._replace(bonus_token_ids=bonus)
        row_ids = jnp.where((row_ids >= 0) & (row_ids < num_rows), row_ids, -1)
        proposed = self.proposed & (row_ids[:, :-1] >= 0)
        return self._replace(proposed=proposed, row_ids=row_ids, bonus_token_ids=bonus)

    def checked(self, read: RowRead) -> RowRead:
        """A read in which no row that nobody has is invalid."""
        if self.row_ids is None:
            return read
        nobody = slots_of_rows(self.row_ids, read.valid.shape[0]) == self.row_ids.shape[0]
        return read._replace(valid=read.valid | nobody)
