"""A look at this model's programs on this machine: do a row's bits depend on what stands beside it?

In tiles, a product of 8 rows is to add up as one of 32 does. That is so on the CPUs that were
looked at, and nobody knows all of them: whoever promises the same bits looks first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model import own_model
from jax_specdec.device.model.own_model import Model
from jax_specdec.device.model.params import KVCache

MOST_SLOTS = 8  # of a step that is looked at


def with_bits_of_their_own(
    params: Any, model: Model, num_slots: int, width: int, max_length: int
) -> Model:
    """The model in tiles, in smaller ones too if rows have the same bits in them.

    One sequence is computed in chunks of every size that makes another tile, and in steps of
    several slots: by two of the decoder's layers and its head, or by all of a model of the user's
    own.

    Args:
      params, model: with `row_tile`, and with `row_step` where smaller tiles are to be tried.
      num_slots: of a step.
      width: positions of a slot in a step.
      max_length: positions of a slot.

    Raises:
      ValueError: rows differ in whole tiles too.
    """
    tile, step = own_model.row_tile(model), getattr(model, "row_step", None)
    assert tile is not None
    small, slots = model, min(num_slots, MOST_SLOTS)
    if isinstance(model, ModelConfig):
        params, small = first_layers(params, model)
    length = min(2 * tile, max_length)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab_size, length), jnp.int32)
    whole_tiles_model = replace(small, row_step=None) if isinstance(small, ModelConfig) else small
    expected = row_bits_of(params, whole_tiles_model, tokens, length)

    def differing(model: Model, sizes: list[tuple[int, int]]) -> list[str]:
        return [
            f"{slots} slots x {size}"
            for slots, size in sizes
            if (row_bits_of(params, model, tokens, size, slots) != expected).any()
        ]

    if step is not None:
        sizes = [(1, size) for size in (*range(step, tile, step), length)] + [(slots, width)]
        if not differing(small, sizes):
            return model
    others = differing(whole_tiles_model, [(1, min(tile, length)), (slots, width)])
    if others:
        raise ValueError(
            f"batch_invariant = True, but on this {jax.devices()[0].device_kind} rows of this "
            f"model have other bits in steps of {', '.join(others)} than in one of {length}, in "
            f"tiles of row_tile = {tile}: try another row_tile, or leave batch_invariant out"
        )
    return replace(model, row_step=None) if isinstance(model, ModelConfig) else model


def first_layers(params: Any, config: ModelConfig) -> tuple[Any, ModelConfig]:
    """Two layers, of both kinds where a model has both: one alone would be no loop."""
    sliding = [n for n in range(config.num_layers) if n in config.sliding_layers]
    others = [n for n in range(config.num_layers) if n not in config.sliding_layers]
    both = [*sliding[:1], *others[:1]] if sliding and others else range(config.num_layers)[:2]
    layers = sorted(both)
    small = replace(
        config,
        num_layers=len(layers),
        sliding_layers=tuple(n for n, layer in enumerate(layers) if layer in sliding),
    )
    index = np.array(layers)
    return replace(params, layers=jax.tree.map(lambda x: x[index], params.layers)), small


def row_bits_of(
    params: Any, model: Model, tokens: jax.Array, size: int, slots: int = 1
) -> np.ndarray:
    """The bits [B, S, E + V] of hidden states and logits, of `size` positions of B slots a step."""
    cache = own_model.empty_cache(model, slots, len(tokens))
    rows = []
    for start in range(0, len(tokens), size):
        places = start + np.arange(size, dtype=np.int32)
        chunk = np.asarray(tokens)[np.minimum(places, len(tokens) - 1)]
        places = np.where(places < len(tokens), places, -1)  # padding
        hidden, logits, cache = run_step(
            params, model, np.tile(chunk, (slots, 1)), np.tile(places, (slots, 1)), cache
        )
        rows.append(np.concatenate([hidden, logits], axis=2))
    return np.concatenate(rows, axis=1)[:, : len(tokens)]


@partial(jax.jit, static_argnums=1)
def run_step(
    params: Any, model: Model, tokens: jax.Array, places: jax.Array, cache: KVCache
) -> tuple[jax.Array, jax.Array, KVCache]:
    hidden, cache = own_model.run_model(params, model, tokens, places, cache)
    logits = own_model.head(params, model, hidden)
    bits = [
        jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) for x in (hidden, logits)
    ]
    return bits[0], bits[1], cache
