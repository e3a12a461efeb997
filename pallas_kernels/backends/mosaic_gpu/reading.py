"""How pass 1 reads logits: blocks in vectors, the blocks at a row's ends, the given token's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.tiling import RUN, Tiling


def selected_logit(
    tiling: Tiling, logits_ref: Any, first: Any, chosen: jax.Array | None
) -> jax.Array | None:
    """The given token's logit in the row that starts at `first`, float32; None without a token."""
    if chosen is None:
        return None
    if chosen.dtype != jnp.int32:
        return chosen
    token = jnp.clip(chosen, 0, tiling.vocabulary - 1)
    return compat.asarray(logits_ref[first + token].astype(jnp.float32))


def read_block(
    logits_ref: Any, start: Any, tiling: Tiling, vector: int, interpreted: bool
) -> list[jax.Array]:
    """Pieces (`tiling.piece(vector)`) of the block at `start`, which is a multiple of `vector`."""
    return compat.load_block(
        logits_ref,
        start,
        (tiling.groups_per_block, tiling.group_width),
        tiling.piece(vector)[1],
        tiling.layout(vector),
        interpreted,
    )


def read_edge(
    logits_ref: Any,  # [N * V]
    first: Any,
    skew: Any,
    block: int,
    tiling: Tiling,
    vector: int,
    interpreted: bool,
) -> list[jax.Array]:
    """Pieces of an edge block of the row that starts at `first`; -inf outside the block."""
    start, begin, end = tiling.block_ids(block, skew)
    pieces = read_block(logits_ref, first + start, tiling, vector, interpreted)
    if tiling.aligned and (block + 1) * tiling.block <= tiling.vocabulary:
        return pieces  # a whole block that is in no step
    shape, layout = pieces[0].shape, tiling.layout(vector)
    group = compat.iota(shape, 0, layout) * tiling.group_width + start
    column = compat.iota(shape, 1, layout)
    out = []
    for i, piece in enumerate(pieces):
        ids = group + (column + i * shape[1])
        inside = (ids >= begin) & (ids < end)
        out.append(jnp.where(inside, piece, jnp.asarray(-jnp.inf, piece.dtype)))
    return out


def read_fixed_block(
    logits_ref: Any, start: Any, tiling: Tiling, vector: int, interpreted: bool
) -> list[jax.Array]:
    """Pieces (`tiling.piece(RUN)`) of the block of fixed groups at `start`, a multiple of `vector`.

    A piece is loaded in vectors of so many logits, RUN of them a thread.
    """
    return compat.load_block(
        logits_ref,
        start,
        (tiling.groups_per_block, tiling.group_width),
        tiling.piece(RUN)[1],
        tiling.fixed_layout(vector),
        interpreted,
    )


def read_fixed_edge(
    logits_ref: Any, first: Any, block: int, tiling: Tiling, vector: int, interpreted: bool
) -> list[jax.Array]:
    """`read_fixed_block` of a block that may go beyond the row: -inf there, where nothing is read.

    The row starts at `first`, and its length is a multiple of `vector`.
    """
    begin = block * tiling.block
    if begin + tiling.block <= tiling.vocabulary:
        return read_fixed_block(logits_ref, first + begin, tiling, vector, interpreted)
    shape, layout = tiling.piece(RUN), tiling.fixed_layout(vector)
    number = tiling.group_width // shape[1]
    if interpreted:
        there = logits_ref[pl.ds(first + begin, tiling.vocabulary - begin)]
        missing = jnp.full(begin + tiling.block - tiling.vocabulary, -jnp.inf, there.dtype)
        whole = jnp.concatenate([there, missing]).reshape(shape[0], -1)
        return jnp.split(whole, number, axis=1)

    def body(logits: Any, first: Any) -> Any:
        lanes = shape[1] // RUN
        me = thread.thread()
        group, column = me >> (lanes.bit_length() - 1), (me & (lanes - 1)) * RUN
        mine = group * tiling.group_width + column + begin
        return tuple(run(logits, thread.word(first), mine + i * shape[1]) for i in range(number))

    def run(logits: Any, first: thread.Word, token: thread.Word) -> Any:
        ids = [token + i for i in range(0, RUN, vector)]
        last = tiling.vocabulary - vector
        places = [first + thread.smaller(token, last) for token in ids]
        there = [token < tiling.vocabulary for token in ids]
        loaded = [
            thread.load_or(logits, place, vector, inside, float("-inf"))
            for place, inside in zip(places, there, strict=True)
        ]
        tiled = layout.to_mgpu()
        registers = np.array(loaded, dtype=object).reshape(tiled.registers_shape(shape))
        return thread.mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    kind = thread.result(shape, logits_ref.dtype, layout)
    arguments, layouts = (logits_ref, first), (None, "scalar")
    return list(thread.inline(body, arguments, layouts, (kind,) * number))
