"""Attention over the entries of a cache, tile by tile, and over keys that are all there.

Axis letters: B slots of a step, C slots of the cache, S positions, T positions of the cache, G
key/value heads, H query heads, N = H / G, Dh head size.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.arithmetic import precision, soft_capped
from jax_specdec.device.model.params import KVCache
from jax_specdec.device.model.tiles import KEY_TILE, as_tiles, whole_tiles

CPU_KEY_TILE = 128  # for rows with bits of their own: there a slot's 8 rows pay for keys unseen
QUERY_TILE = 8  # rows of a slot, where a row's bits are its own


class Scoring(NamedTuple):
    """The part of a `ModelConfig` that the scores of attention depend on."""

    attention_scale: float | None = None
    attention_softcap: float | None = None


class Seen(NamedTuple):
    """The cache entries that each row attends to, from `first` to `last`, with both."""

    first: Int32[Array, "B S"]
    last: Int32[Array, "B S"]


def cached_attention(
    config: ModelConfig | Scoring,
    q: Float[Array, "B S H Dh"],
    cache: Annotated[KVCache, "B = C"],
    place: tuple[jax.Array, jax.Array],
    seen: Seen,
    tile: int = KEY_TILE,
    reached: tuple[jax.Array, jax.Array] | None = None,
) -> Float[Array, "B S H*Dh"]:
    """`attention` over the entries of a cache, tile by tile up to the last that any row sees.

    A tile of which a row sees nothing changes none of its bits: its own weights are 0, and those
    before are times 1. So a row has the same bits whatever other rows see.

    Args:
      config: of the scale and the soft cap.
      q: of B slots.
      cache: with the rows' own entries.
      place: the layer, and the first of the B slots.
      seen: by row.
      tile: entries that are taken in at a time.
      reached: the tiles that a loop goes through, where there shall be a loop whatever the cache
        has; None: those that a row sees.

    Source: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
    """
    b, s, h, dh = q.shape
    length, g = cache.k.shape[2:4]
    tile = min(tile, length)
    grouped = q.reshape(b, s, g, h // g, dh)
    zero, lowest = jnp.int32(0), float(np.finfo(np.float32).min)

    def take_in(
        index: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest, total, out = sums
        begin = index * tile
        start = jnp.minimum(begin, length - tile)  # the last tile may overlap the one before
        k, v = (
            lax.dynamic_slice(x, (*place, start, zero, zero), (1, b, tile, g, dh))[0]
            for x in (cache.k, cache.v)
        )
        entries = (start + jnp.arange(tile, dtype=jnp.int32))[None, None, :]
        visible = (entries >= jnp.maximum(seen.first, begin)[:, :, None]) & (
            entries <= seen.last[:, :, None]
        )
        scores = _scores(config, grouped, k, visible)
        above = jnp.maximum(largest, scores.max(axis=-1))
        old, weights = jnp.exp(largest - above), jnp.exp(scores - above[..., None])
        more = jnp.einsum(
            "bgnst,btgd->bgnsd", weights.astype(v.dtype), v,
            precision=precision(q), preferred_element_type=jnp.float32,
        )  # fmt: skip
        return above, old * total + weights.sum(axis=-1), old[..., None] * out + more

    rows = jnp.zeros((b, g, h // g, s), jnp.float32)
    none = rows + lowest, rows, jnp.zeros((*rows.shape, dh), jnp.float32)
    if reached is None and length == tile:
        _, total, out = take_in(zero, none)
    else:
        _, total, out = lax.fori_loop(*(reached or _reached(*seen, tile)), take_in, none)
    out = jnp.moveaxis(out / total[..., None], 3, 1)
    return out.astype(q.dtype).reshape(b, s, h * dh)


def _reached(
    first: jax.Array, last: jax.Array, tile: int, axes: tuple[int, ...] | None = None
) -> tuple[jax.Array, jax.Array]:
    """The first tile of entries that a row sees, and the one behind the last."""
    return jnp.min(first, axes) // tile, jnp.max(last, axes) // tile + 1


def attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B T G Dh"],
    v: Float[Array, "B T G Dh"],
    visible: Bool[Array, "B S T"],
    config: ModelConfig | Scoring,
) -> Float[Array, "B S H*Dh"]:
    """Grouped-query attention: query heads h * H/G .. (h + 1) * H/G - 1 share key head h.

    Every query must see at least one entry. Products are times the configuration's scale, by
    default 1 / sqrt(Dh).
    """
    b, s, h, dh = q.shape
    scores = _scores(config, q.reshape(b, s, k.shape[2], h // k.shape[2], dh), k, visible)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(
        "bgnst,btgd->bsgnd", weights, v, precision=precision(q), preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype).reshape(b, s, h * dh)


def _scores(
    config: ModelConfig | Scoring,
    q: Float[Array, "B S G N Dh"],
    k: Float[Array, "B T G Dh"],
    visible: Bool[Array, "B S T"],
) -> Float[Array, "B G N S T"]:
    """Logits of attention, in float32; -inf where a row does not see an entry."""
    scores = jnp.einsum(
        "bsgnd,btgd->bgnst", q, k, precision=precision(q), preferred_element_type=jnp.float32
    )
    scale = q.shape[-1] ** -0.5 if config.attention_scale is None else config.attention_scale
    scores = soft_capped(scores * jnp.float32(scale), config.attention_softcap)
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def attention_in_tiles(
    config: ModelConfig | Scoring,
    q: Float[Array, "B S H Dh"],
    cache: Annotated[KVCache, "B = C"],
    place: tuple[jax.Array, jax.Array],
    seen: Seen,
) -> Float[Array, "B S H*Dh"]:
    """`cached_attention` of `QUERY_TILE` rows of each slot at a time: a row has bits of its own.

    Raises:
      ValueError: the cache has no whole number of tiles.
    """
    if cache.k.shape[2] % KEY_TILE:
        raise ValueError(
            f"{cache.k.shape[2]} entries of a slot are no whole number of tiles: make it a "
            f"multiple of {KEY_TILE}, as `whole_tiles` does"
        )
    b, s = q.shape[:2]
    layer, first_slot = place

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(as_tiles(x, QUERY_TILE).reshape(b, -1, QUERY_TILE, *x.shape[2:]), 1, 0)

    def attended(q: jax.Array, seen: Any, cache: Any, *, tile: int, slots: int) -> jax.Array:
        """`slots` of the B at a time, of tiles [N, B, QUERY_TILE, ...]."""
        groups = b // slots

        def grouped(x: jax.Array) -> jax.Array:
            return x.reshape(-1, slots, *x.shape[2:])

        def of_group(part: tuple[jax.Array, Seen, jax.Array, Any]) -> jax.Array:
            q, seen, group, reached = lax.optimization_barrier(part)
            there = layer, first_slot + group * slots
            out = cached_attention(config, q, cache, there, seen, tile, reached)
            pinned: jax.Array = lax.optimization_barrier(out)
            return pinned

        tiles = q.shape[0]
        q, seen = jax.tree.map(grouped, (q, seen))
        numbers = jnp.tile(jnp.arange(groups, dtype=jnp.int32), tiles)
        # Outside of the loops, those of layers too: a compiler takes nothing out of them.
        reached = _reached(seen.first, seen.last, tile, (1, 2))
        out: jax.Array = lax.map(of_group, (q, seen, numbers, reached))
        return out.reshape(tiles, b, *out.shape[2:])

    tile_inputs = *jax.tree.map(split, (q, seen)), cache
    # On a CPU one slot at a time: there the order of sums and products follows an array's size.
    on_cpu = partial(attended, tile=CPU_KEY_TILE, slots=1)
    elsewhere = partial(attended, tile=KEY_TILE, slots=b)
    out = jnp.moveaxis(lax.platform_dependent(*tile_inputs, cpu=on_cpu, default=elsewhere), 0, 1)
    return out.reshape(b, -1, out.shape[-1])[:, :s]


def tiled_attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B T G Dh"],
    v: Float[Array, "B T G Dh"],
    first: Int32[Array, "B S"],
    last: Int32[Array, "B S"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B S H*Dh"]:
    """`attention` over tiles of keys and of rows, with `attention`'s gradient.

    Args:
      q, k, v: any T; it is padded to whole tiles.
      first, last: the entries that each row sees, with both.
      scale, soft_cap: of scores; see `ModelConfig`.
    """
    return _tiled(Scoring(scale, soft_cap), q, k, v, Seen(first, last))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(scoring: Scoring, q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen) -> jax.Array:
    missing = whole_tiles(k.shape[1]) - k.shape[1]
    k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))[None] for x in (k, v))
    zero = jnp.int32(0)
    return attention_in_tiles(scoring, q, KVCache(k, v), (zero, zero), seen)


def _tiled_forward(scoring: Scoring, *inputs: Any) -> tuple[jax.Array, Any]:
    return _tiled(scoring, *inputs), inputs


def _tiled_backward(scoring: Scoring, inputs: Any, gradient: jax.Array) -> tuple[Any, ...]:
    q, k, v, seen = inputs
    entries = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
    visible = (entries >= seen.first[:, :, None]) & (entries <= seen.last[:, :, None])
    _, back = jax.vjp(lambda q, k, v: attention(q, k, v, visible, scoring), q, k, v)
    return (*back(gradient), None)


_tiled.defvjp(_tiled_forward, _tiled_backward)
