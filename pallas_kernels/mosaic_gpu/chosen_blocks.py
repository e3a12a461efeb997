"""Blocks of a row that a kernel reads again, because something of their groups is wanted.

The row was read before, in fixed groups, and the groups' maxima and sums say which of its blocks
still matter. A kernel holds a flag for each group; the loop here finds the flagged blocks one after
the other, in the order of their ids, and reads no other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat, thread
from pallas_kernels.mosaic_gpu.reading import read_fixed_edge
from pallas_kernels.mosaic_gpu.tiling import RUN, WARPGROUP, Tiling

NO_GROUP = 2**31 - 1
WIDTH = 256  # logits of a group


class Row(NamedTuple):
    """A row of logits as a kernel reads it again."""

    tiling: Tiling
    logits_ref: Any  # [N * V]
    first: Any  # where the row starts
    interpreted: bool

    @property
    def vector(self) -> int:
        """The logits that a thread can load at once wherever a row begins."""
        vector = self.tiling.vector
        while self.tiling.vocabulary % vector:
            vector //= 2
        return vector

    @property
    def layout(self) -> Any:
        """Registers of a piece of a block."""
        return self.tiling.fixed_layout(self.vector)

    def block(self, number: Any) -> list[jax.Array]:
        """Pieces of a block; -inf beyond the row."""
        return read_fixed_edge(
            self.logits_ref, self.first, number, self.tiling, self.vector, self.interpreted
        )

    def ids(self, number: Any) -> list[jax.Array]:
        """The token ids of the pieces of a block, int32."""
        shape = self.tiling.piece(RUN)
        group = compat.iota(shape, 0, self.layout) * WIDTH + number * self.tiling.block
        column = compat.iota(shape, 1, self.layout)
        return [group + (column + i) for i in range(0, WIDTH, shape[1])]

    def groups(self, number: Any) -> jax.Array:
        """The numbers of the groups of a block, int32."""
        size = self.tiling.groups_per_block
        first: jax.Array = compat.iota((size,), 0, self.layout.reduce(1)) + number * size
        return first

    def group(self, number: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One group's logits [256] float32, their ids and the first id of these.

        A last group that is cut off begins earlier, within the row.
        Ids below 256 * `number` are those of the group before.
        """
        begin = jnp.minimum(number * WIDTH, self.tiling.vocabulary - WIDTH)
        x = compat.load_vector(self.logits_ref, self.first + begin, WIDTH, self.interpreted)
        return x.astype(jnp.float32), compat.vector_iota(WIDTH) + begin, begin


def padded_size(number: int) -> int:
    """The length of a vector of so many groups: whole warpgroups."""
    return -(-number // WARPGROUP) * WARPGROUP


def load_groups(ref: Any, row: Any, number: int, otherwise: float, interpreted: bool) -> jax.Array:
    """A row of [R * number] float32 as a vector of `padded_size`; `otherwise` from there on."""
    size, start = padded_size(number), row * number
    if interpreted:
        missing = jnp.full(size - number, otherwise, jnp.float32)
        return jnp.concatenate([ref[pl.ds(start, number)], missing])
    layout = compat.vector_layout()

    def body(here: Any, first: Any) -> Any:
        registers = []
        for i in range(0, size, WARPGROUP):
            place = thread.thread() + i
            inside = place < number
            at = thread.word(first) + thread.smaller(place, number - 1)
            registers.append(thread.load_or(here, at, 1, inside, otherwise))
        tiled = layout.to_mgpu()
        return thread.vector_of(registers, tiled, (size,))

    kind = thread.result((size,), jnp.float32, layout)
    return compat.asarray(thread.inline(body, (ref, start), (None, "scalar"), kind))


def over_blocks(
    row: Row,
    flags: jax.Array,
    work: Callable[[jax.Array, list[jax.Array], Any], Any],
    initial: Any,
) -> Any:
    """work(block, its pieces, carry) -> carry, over the blocks with a flagged group, ascending.

    flags: [padded_size] bool, in a `compat.vector_layout`.
    """
    size = row.tiling.groups_per_block
    numbers = compat.vector_iota(flags.shape[0])

    def next_group(begin: Any) -> jax.Array:
        # A minimum as a maximum, which is one instruction a warp.
        found = jnp.where(flags & (numbers >= begin), ~numbers, jnp.int32(~NO_GROUP))
        return compat.asarray(~jnp.max(found))

    def body(state: Any) -> Any:
        group, carry = state
        block = group // size
        group = next_group((block + 1) * size)
        return group, work(block, row.block(block), carry)

    return lax.while_loop(
        lambda state: state[0] < NO_GROUP, body, (next_group(jnp.int32(0)), initial)
    )[1]
