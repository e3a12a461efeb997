"""How pass 1 reads logits: blocks in vectors, the blocks at a row's ends, the given token's."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.tiling import Tiling


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
