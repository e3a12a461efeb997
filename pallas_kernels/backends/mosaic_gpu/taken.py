"""The tokens that are left out of a row that is drawn from, in a kernel: those of a draft's q.

To compare each of them with everything that a thread holds would take long. Instead each thread has
one of them and writes a mark to shared memory, where every thread finds the marks of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.chosen_groups import WIDTH, Chosen, Row
from pallas_kernels.backends.mosaic_gpu.thread import Word, word
from pallas_kernels.backends.mosaic_gpu.tiling import RUN, WARPGROUP, Tiling

BITS = 32  # tokens of a word


def words_of(tiling: Tiling) -> int:
    """Words of shared memory: a bit for each token of as many groups as are read at a time."""
    return tiling.block // BITS


class Taken(NamedTuple):
    """A slot's taken tokens, in a kernel."""

    ids_ref: Any  # [B * M] i32: distinct; -1 where there is none
    start: Any
    number: int  # M, at most one a thread
    chosen: Chosen  # the groups that are read again; its memory is used before it is made
    bits_ref: Any  # [words_of] i32 in shared memory, which is used
    interpreted: bool

    def groups_of(self, size: int) -> jax.Array:
        """Which of the groups 0 to `size` have one [size]."""
        return self._flags(size, WIDTH.bit_length() - 1, jnp.int32(0))

    def in_group(self, begin: Any) -> jax.Array:
        """Which of the tokens from `begin` on are taken [256]."""
        return self._flags(WIDTH, 0, begin)

    def without(
        self, pieces: list[jax.Array], ids: list[jax.Array], turn: Any, row: Row
    ) -> list[jax.Array]:
        """The pieces of a turn's groups, with -inf for the tokens that are taken.

        Args:
          pieces: of the row; of a turn of `over_groups`.
          ids: of their tokens.
          turn: which one.
          row: the row.
        """
        if self.interpreted:
            nothing = jnp.asarray(-jnp.inf, pieces[0].dtype)
            pairs = zip(pieces, ids, strict=True)
            return [jnp.where(self._are(here), nothing, piece) for piece, here in pairs]
        tiling, shape = row.tiling, pieces[0].shape

        def body(taken: Any, bits: Any, places: Any, start: Any, turn: Any, *given: Any) -> Any:
            def place_of(token: Word) -> Word:
                group = word(thread.load(places, thread.larger(token, 0) >> 8))
                return (group - word(turn) * tiling.groups_per_block) * WIDTH + (token & 255)

            def mark(at: Word) -> None:
                thread.add_atomically(bits, at >> 5, word(1) << (at & (BITS - 1)))

            self._mark(taken, bits, word(start), place_of, tiling.block, WARPGROUP, mark)
            me, lanes = thread.thread(), shape[1] // RUN
            group, column = me >> (lanes.bit_length() - 1), (me & (lanes - 1)) * RUN
            first = group * WIDTH + column
            out = []
            for i, piece in enumerate(given):
                mine = first + i * shape[1]
                found = word(thread.load(bits, mine >> 5)) >> (mine & (BITS - 1))
                out.append(thread.kept(piece, ~found))
            return tuple(out)

        kinds = tuple(thread.result(shape, piece.dtype, row.layout) for piece in pieces)
        references = self.ids_ref, self.bits_ref, self.chosen.places_ref
        layouts = (None, None, None, "scalar", "scalar", *[row.layout] * len(pieces))
        return list(thread.inline(body, (*references, self.start, turn, *pieces), layouts, kinds))

    def _flags(self, size: int, shift: int, begin: Any) -> jax.Array:
        """Which of `size` places, from `begin` on, some token has when it is shifted right."""
        if self.interpreted:
            places = jnp.arange(size, dtype=jnp.int32) + begin
            return self._are(places, shift)
        layout = compat.vector_layout()

        def body(taken: Any, marks: Any, start: Any, begin: Any) -> Any:
            def mark(at: Word) -> None:
                thread.store(marks, at, 1)

            def place_of(token: Word) -> Word:
                return (token >> shift) - word(begin)

            self._mark(taken, marks, word(start), place_of, size, size, mark)
            mine = range(0, size, WARPGROUP)
            found = [word(thread.load(marks, thread.thread() + i)) for i in mine]
            return thread.vector_of(found, layout.to_mgpu(), (size,))

        arguments = (self.ids_ref, self.chosen.places_ref, self.start, begin)
        layouts = (None, None, "scalar", "scalar")
        kind = thread.result((size,), jnp.int32, layout)
        found: jax.Array = compat.asarray(thread.inline(body, arguments, layouts, kind)) != 0
        return found

    def _mark(
        self,
        taken: Any,
        marks: Any,
        start: Word,
        place_of: Callable[[Word], Word],
        size: int,
        used: int,
        mark: Callable[[Word], None],
    ) -> None:
        """Set `used` words to 0, then mark each token's place, if it is one of 0 to `size`."""
        me = thread.thread()
        thread.barrier()  # what was here before has been read
        for i in range(0, used, WARPGROUP):
            thread.store(marks, me + i, 0)
        thread.barrier()
        token = word(thread.load(taken, start + thread.smaller(me, self.number - 1)))
        place = place_of(token)
        here = (token >= 0) & (me < self.number) & (place >= 0) & (place < size)
        thread.when(here, lambda: mark(place))
        thread.barrier()

    def _are(self, places: jax.Array, shift: int = 0) -> jax.Array:
        """Which places a token has, in an interpreted kernel."""
        ids = self.ids_ref[pl.ds(self.start, self.number)]
        shifted = jnp.where(ids >= 0, ids >> shift, -1).reshape(*[1] * places.ndim, -1)
        found: jax.Array = (places[..., None] == shifted).any(axis=-1)
        return found
