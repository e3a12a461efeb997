"""The learner's side of the same bits: logprobs of whole sequences, as the rollout had them.

With a model whose `row_tile` is set, a token's logprob has bits of its own: those of a step, of a
prefill and of a pass over whole sequences are the same, on the same jax, devices and tiles. A
digest of these travels with each message.

Axes: B sequences, T tokens of each, M ids of a kept set, E hidden size, V vocabulary.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32

from ipc.wire import KEPT_ALL
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model import llama, own_model
from jax_specdec.device.model.attention import (
    CPU_KEY_TILE,
    QUERY_TILE,
    attention,
    tiled_attention,
)
from jax_specdec.device.model.own_model import Model
from jax_specdec.device.model.rotary import Slides
from jax_specdec.device.model.tiles import KEY_TILE, over_rows
from pallas_kernels import row_digests as row_digests_of
from pallas_kernels.sampling import check_digests, check_kept, kept_logprobs, rollout_logprobs

_AnyArray = jax.Array | np.ndarray
Kept = tuple[_AnyArray, _AnyArray, _AnyArray]

Scores = TypeVar("Scores")

_LOGITS_BYTES = 32 << 20  # of the float32 logits that are there at once


def sequence_logprobs(
    params: Any,
    model: Model,
    token_ids: Int32[_AnyArray, "B T"],
    temperatures: Float[_AnyArray, "*any"] | float | None = None,
    kept: Kept | None = None,
    *,
    row_digests: _AnyArray | None = None,
    digest: int | _AnyArray | None = None,
    on_other_digest: Literal["refuse", "warn"] = "refuse",
) -> Float32[Array, "B N"]:
    """The logprob of each token but the first, with the bits that its rollout has.

    So the ratio of an unchanged policy is 1, not nearly 1. Differentiable in reverse by params and
    temperatures: the gradient is that of the same function without tiles, which runs once more.

    Args:
      params, model: those of the rollout; `row_tile` of the model says the tiles.
      token_ids: prompts and what followed, padded behind with any ids: a token depends on those
        before it.
      temperatures: of the rollouts, what broadcasts to [B, T - 1]. None: raw logprobs.
      kept: for processed ones, padded kept sets [B, T - 1, M] as `kept_logprobs` has them; without,
        logprobs are raw or scaled.
      row_digests: of the rollout's tokens (`record.row_digest`, `columns.row_digest`), [B, T - 1]
        uint64 or [B, T - 1, 2] uint32, 0 where there is none: a row of other logits is refused.
        Under `jax.jit`, and where a gradient is taken, its logprob is NaN instead.
      digest: of the rollout's messages (`Record.digest`), or one for each of its tokens
        (`columns.digest`); None: whoever calls has looked at it.
      on_other_digest: where it is not that of this process, raise an error, or warn and go on.

    Raises:
      ValueError: the model has no tiles, another digest, kept sets of other rows or that cannot be
        (`check_kept`), or rows of other logits.
    """
    tile, model_digest = own_model.row_tile(model), digest_of(model)
    if tile is None:
        raise ValueError(
            "row_tile = None: such a model's logprobs have other bits in another batch; give it "
            "the row_tile of the rollout, as dataclasses.replace(model, row_tile=32) does"
        )
    if digest is not None and (others := _others(digest, model_digest)):
        text = (
            f"the rollout has the digest {others[0]}, and this process {model_digest}: jax, the "
            "device, the mesh, the dtype or a tile is another, so ratios are near 1 and not 1"
        )
        if on_other_digest == "refuse":
            raise ValueError(f'{text}; on_other_digest="warn" goes on')
        warnings.warn(text, stacklevel=2)
    if isinstance(model, ModelConfig):
        # A rollout's smaller tiles have the bits of these: its worker has looked.
        model = replace(model, row_step=None)
    ids = jnp.asarray(token_ids, jnp.int32)
    rows = (ids.shape[0], ids.shape[1] - 1)
    if temperatures is not None:
        temperatures = jnp.broadcast_to(jnp.asarray(temperatures, jnp.float32), rows)
    sets: Kept | None = None
    if kept is not None:
        sets = checked = check_kept(kept, model.vocab_size)
        if checked.counts.shape != rows:
            raise ValueError(
                f"kept sets of {checked.counts.shape} tokens do not go with sequences {ids.shape}: "
                f"give one for each token but the first, {rows}"
            )
    if row_digests is None:
        return _scored(model, params, ids, temperatures, sets, False)[0]
    logprobs, digests = _scored(model, params, ids, temperatures, sets, True)
    assert digests is not None
    return jnp.where(check_digests(digests, row_digests), logprobs, jnp.nan)


def digest_of(model: Model, mesh: Mesh | None = None, implementation: str | None = None) -> int:
    """16 bits of what a row's bits depend on, beside weights and tokens; 0 without tiles.

    That is the versions of jax and jaxlib, the device, the mesh, the dtype and the tiles.
    """
    tile = own_model.row_tile(model)
    if tile is None:
        return 0
    device = jax.devices()[0]
    parts: list[Any] = [jax.__version__, version("jaxlib"), device.platform, device.device_kind]
    if device.platform == "cpu":  # products take the widest vectors that there are
        info = Path("/proc/cpuinfo").read_text().split("\n")
        parts.append(next((line for line in info if line.startswith("flags")), ""))
    parts += [mesh and tuple(mesh.shape.items()), implementation, model.dtype]
    parts += [tile, KEY_TILE, CPU_KEY_TILE, QUERY_TILE]
    return 1 + zlib.crc32(repr(parts).encode()) % 0xFFFF


def _others(digest: int | _AnyArray, model_digest: int) -> list[int]:
    """The digests that are another one.

    Raises:
      TypeError: they are no integers.
    """
    digests = np.asarray(digest)
    if not np.issubdtype(digests.dtype, np.integer):
        raise TypeError(
            f"digest = {digest!r} must be an integer, as `Record.digest` is, or an array of them"
        )
    return sorted({*digests.reshape(-1).tolist()} - {model_digest})


@partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def _scored(
    model: Model,
    params: Any,
    ids: jax.Array,
    t: jax.Array | None,
    kept: Kept | None,
    with_digests: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Logprobs [B, N], and digests of their rows [B, N, 2] where they are wanted."""

    def of_rows(logits: jax.Array, *others: Any) -> tuple[jax.Array, jax.Array | None]:
        logprobs = rollout_logprobs(logits, *others)
        return logprobs, row_digests_of(
            logits, vocab_size=model.vocab_size
        ) if with_digests else None

    return score(model, params, ids, t, kept, of_rows=of_rows)


def _forward(
    model: Model, params: Any, ids: jax.Array, t: Any, kept: Any, with_digests: bool
) -> tuple[Any, Any]:
    return _scored(model, params, ids, t, kept, with_digests), (params, ids, t, kept)


def _backward(model: Model, with_digests: bool, inputs: Any, gradients: Any) -> tuple[Any, ...]:
    """Of the same function without tiles: rounding is all that differs."""
    params, ids, t, kept = inputs
    plain = replace(model, row_tile=None) if isinstance(model, ModelConfig) else model

    def ordinary(params: Any, t: jax.Array | None) -> jax.Array:
        return score(plain, params, ids, t, kept, of_rows=_plain_logprobs)

    by_params, by_temperature = jax.vjp(ordinary, params, t)[1](gradients[0])
    return by_params, None, by_temperature, None


_scored.defvjp(_forward, _backward)


def _plain_logprobs(
    logits: jax.Array, ids: jax.Array, kept: Kept | None, t: jax.Array | None
) -> jax.Array:
    if kept is None:
        kept = ids[..., None], jnp.full_like(ids, KEPT_ALL), jnp.zeros(ids.shape, jnp.float32)
    return kept_logprobs(logits, ids, kept, 1.0 if t is None else t)


def score(
    model: Model,
    params: Any,
    ids: jax.Array,
    t: jax.Array | None = None,
    kept: Kept | None = None,
    *,
    of_rows: Callable[..., Scores],
) -> Scores:
    """The results of `of_rows` on some rows' logits at a time: a tree of arrays of these rows."""

    @jax.checkpoint
    def some(hidden: jax.Array, *others: Any) -> Scores:
        logits = own_model.head(params, model, hidden[0])
        scores = of_rows(logits, *jax.tree.map(lambda x: x[0], others))
        in_batch: Scores = jax.tree.map(lambda x: x[None], scores)
        return in_batch

    hidden = whole_sequences(params, model, ids[:, :-1])
    tile_rows = own_model.row_tile(model) or 1  # so many rows at once that no tile is padded
    most = max(
        8, tile_rows, _LOGITS_BYTES // (4 * own_model.head_columns(model)) // tile_rows * tile_rows
    )
    scores: Scores = over_rows(
        some, hidden, ids[:, 1:], kept, t, tile=min(most, hidden[..., 0].size)
    )
    return scores


def whole_sequences(
    params: Any, model: Model, tokens: Int32[Array, "B S"]
) -> Float[Array, "B S E"]:
    """Hidden states of sequences from their beginning, each row after those before it.

    The decoder that comes along keeps no cache here, and computes a layer once more in the backward
    pass.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if not isinstance(model, ModelConfig):
        return model.forward(params, tokens, positions, model.init_cache(*tokens.shape))[0]
    config, zero_positions = model, jnp.zeros_like(positions)
    near = zero_positions
    if config.sliding_window is not None:
        near = jnp.maximum(positions - config.sliding_window + 1, 0)
    is_sliding = np.isin(np.arange(config.num_layers), config.sliding_layers)
    mixed = is_sliding.any() != is_sliding.all()

    @jax.checkpoint
    def layer(x: jax.Array, layer_inputs: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        weights, index = layer_inputs
        slides: Slides = jnp.asarray(is_sliding)[index] if mixed else bool(is_sliding[0])
        first = jnp.where(slides, near, zero_positions)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            if config.row_tile is not None:
                scoring = {"scale": config.attention_scale, "soft_cap": config.attention_softcap}
                return tiled_attention(q, k, v, first, positions, **scoring), None
            entries = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
            visible = (entries >= first[:, :, None]) & (entries <= positions[:, :, None])
            return attention(q, k, v, visible, config), None

        return llama.decoder_layer(weights, config, x, positions, attend, slides)[0], None

    x = llama.embed(params, config, tokens)
    x, _ = lax.scan(layer, x, (params.layers, jnp.arange(config.num_layers, dtype=jnp.int32)))
    return llama.final_norm(params, config, x)
