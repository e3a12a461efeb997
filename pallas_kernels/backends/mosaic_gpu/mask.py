"""Forbidden tokens, whose logits the GPU kernels read as -inf: a bit a token, in global memory.

A thread holds vectors of consecutive logits. Where rows start at vectors, their bits lie in one
word, else in two. The words of a row start at a multiple of the words of a row, not of a vector:
they are loaded one by one, and the threads of a warp find them in the same few sectors.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import thread
from pallas_kernels.backends.mosaic_gpu.thread import Word, word
from pallas_kernels.backends.mosaic_gpu.tiling import WARPGROUP, Tiling
from pallas_kernels.contract.changes import WORD


class Mask(NamedTuple):
    """The words of a row, in a kernel."""

    words_ref: Any  # [R * words] i32
    start: Any  # where the row's words start

    @classmethod
    def of_row(cls, words_ref: Any, target: Any, tiling: Tiling) -> "Mask | None":
        """Those of a target row; None without a mask."""
        return None if words_ref is None else cls(words_ref, target * words_of(tiling))


def words_of(tiling: Tiling) -> int:
    """The number of words of a row."""
    return -(-tiling.vocabulary // WORD)


def masked(
    pieces: list[jax.Array],
    mask: Mask | None,
    first_id: Any,
    tiling: Tiling,
    vector: int,
    interpreted: bool,
) -> list[jax.Array]:
    """The pieces of a block that starts at `first_id`, with -inf where the mask forbids an id."""
    if mask is None:
        return pieces
    shape, layout = pieces[0].shape, tiling.layout(vector)
    if interpreted:
        return [
            jnp.where(
                allowed(
                    mask,
                    first_id
                    + jnp.arange(shape[0], dtype=jnp.int32)[:, None] * tiling.group_width
                    + (jnp.arange(shape[1], dtype=jnp.int32)[None] + i * shape[1]),
                    tiling,
                ),
                piece,
                jnp.asarray(-jnp.inf, piece.dtype),
            )
            for i, piece in enumerate(pieces)
        ]

    def body(words_ref: Any, start: Any, first: Any, *given: Any) -> Any:
        here = Mask(words_ref, word(start))
        each = WARPGROUP // tiling.groups_per_block  # threads of a group
        me = thread.thread()
        group, column = me >> (each.bit_length() - 1), (me & (each - 1)) * vector
        begin = word(first) + group * tiling.group_width + column
        places = range(len(given))
        bits = [bits_of(here, begin + i * shape[1], vector, tiling) for i in places]
        return tuple(thread.kept(piece, bits[i]) for i, piece in enumerate(given))

    kinds = tuple(thread.result(shape, piece.dtype, layout) for piece in pieces)
    arguments = (mask.words_ref, mask.start, first_id, *pieces)
    layouts = (None, "scalar", "scalar", *[layout] * len(pieces))
    return list(thread.inline(body, arguments, layouts, kinds))


def bits_of(mask: Mask, token: Word, vector: int, tiling: Tiling) -> Word:
    """The bits of `vector` consecutive ids of a thread, the first one lowest; others above them."""
    at = token >> 5
    low = word(thread.load(mask.words_ref, mask.start + at))
    by = token & (WORD - 1)
    if tiling.aligned or vector == 1:
        return low >> by
    after = thread.smaller(at + 1, words_of(tiling) - 1)
    high = word(thread.load(mask.words_ref, mask.start + after))
    return (low >> by) | ((high << 1) << (word(WORD - 1) - by))


def allowed(mask: Mask, ids: jax.Array, tiling: Tiling) -> jax.Array:
    """Whether ids of the row are allowed, in an interpreted kernel."""
    words = mask.words_ref[pl.ds(mask.start, words_of(tiling))]
    found: jax.Array = (words[ids // WORD] >> (ids % WORD)) & 1 == 1
    return found
