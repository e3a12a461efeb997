"""The tokens that are left out of a row that is drawn from, in a kernel: those of a draft's q.

To compare each of them with everything that a thread holds would take long. Instead each thread has
one of them and writes a mark to shared memory, where every thread finds the marks of its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat, thread
from pallas_kernels.mosaic_gpu.chosen_blocks import WIDTH, Row, padded_size
from pallas_kernels.mosaic_gpu.thread import Word, word
from pallas_kernels.mosaic_gpu.tiling import RUN, WARPGROUP

BITS = 32  # tokens of a word


def num_marks(num_groups: int) -> int:
    """Words of shared memory: one a group or token of a group, or a bit a token of a block."""
    return max(padded_size(num_groups), WIDTH)


class Taken(NamedTuple):
    """A slot's taken tokens, in a kernel."""

    ids_ref: Any  # [B * M] i32: distinct; -1 where there is none
    start: Any
    number: int  # M, at most one a thread
    marks_ref: Any  # [num_marks] i32 in shared memory, which is used
    interpreted: bool

    def groups_of(self, size: int) -> jax.Array:
        """Which of the groups 0 to `size` have one [size]."""
        return self._flags(size, WIDTH.bit_length() - 1, jnp.int32(0))

    def in_group(self, begin: Any) -> jax.Array:
        """Which of the tokens from `begin` on are taken [256]."""
        return self._flags(WIDTH, 0, begin)

    def without(
        self, pieces: list[jax.Array], ids: list[jax.Array], block: Any, row: Row
    ) -> list[jax.Array]:
        """The pieces of a block, which have these ids, with -inf for the tokens that are taken."""
        if self.interpreted:
            nothing = jnp.asarray(-jnp.inf, pieces[0].dtype)
            pairs = zip(pieces, ids, strict=True)
            return [jnp.where(self._are(here), nothing, piece) for piece, here in pairs]
        tiling, shape = row.tiling, pieces[0].shape

        def body(taken: Any, marks: Any, start: Any, number: Any, *given: Any) -> Any:
            me, lanes = thread.thread(), shape[1] // RUN
            begin = word(number) * tiling.block

            def mark(at: Word) -> None:
                thread.add_atomically(marks, at >> 5, word(1) << (at & (BITS - 1)))

            self._mark(taken, marks, word(start), begin, tiling.block, 0, WARPGROUP, mark)
            group, column = me >> (lanes.bit_length() - 1), (me & (lanes - 1)) * RUN
            first = group * tiling.group_width + column
            out = []
            for i, piece in enumerate(given):
                mine = first + i * shape[1]
                found = word(thread.load(marks, mine >> 5)) >> (mine & (BITS - 1))
                out.append(thread.kept(piece, ~found))
            return tuple(out)

        kinds = tuple(thread.result(shape, piece.dtype, row.layout) for piece in pieces)
        arguments = (self.ids_ref, self.marks_ref, self.start, block, *pieces)
        layouts = (None, None, "scalar", "scalar", *[row.layout] * len(pieces))
        return list(thread.inline(body, arguments, layouts, kinds))

    def _flags(self, size: int, shift: int, begin: Any) -> jax.Array:
        """Which of `size` places, from `begin` on, some token has when it is shifted right."""
        if self.interpreted:
            places = jnp.arange(size, dtype=jnp.int32) + begin
            return self._are(places, shift)
        layout = compat.vector_layout()

        def body(taken: Any, marks: Any, start: Any, begin: Any) -> Any:
            def mark(at: Word) -> None:
                thread.store(marks, at, 1)

            self._mark(taken, marks, word(start), word(begin), size, shift, size, mark)
            mine = range(0, size, WARPGROUP)
            found = [word(thread.load(marks, thread.thread() + i)) for i in mine]
            return thread.vector_of(found, layout.to_mgpu(), (size,))

        arguments = (self.ids_ref, self.marks_ref, self.start, begin)
        layouts = (None, None, "scalar", "scalar")
        kind = thread.result((size,), jnp.int32, layout)
        found: jax.Array = compat.asarray(thread.inline(body, arguments, layouts, kind)) != 0
        return found

    def _mark(
        self,
        taken: Any,
        marks: Any,
        start: Word,
        begin: Word,
        size: int,
        shift: int,
        used: int,
        mark: Any,
    ) -> None:
        """Set `used` words to 0, then mark(place) of each token's place, if it is below `size`."""
        me = thread.thread()
        thread.barrier()  # what was marked before has been read
        for i in range(0, used, WARPGROUP):
            thread.store(marks, me + i, 0)
        thread.barrier()
        token = word(thread.load(taken, start + thread.smaller(me, self.number - 1)))
        place = (token >> shift) - begin
        here = (token >= 0) & (me < self.number) & (place >= 0) & (place < size)
        thread.when(here, lambda: mark(place))
        thread.barrier()

    def _are(self, places: jax.Array, shift: int = 0) -> jax.Array:
        """Which places a token has, in an interpreted kernel."""
        ids = self.ids_ref[pl.ds(self.start, self.number)]
        shifted = jnp.where(ids >= 0, ids >> shift, -1).reshape(*[1] * places.ndim, -1)
        found: jax.Array = (places[..., None] == shifted).any(axis=-1)
        return found
