"""The matrices of each layer as arrays of their own, as a CPU's loop over layers takes them.

A scan takes a layer's weights out of their stacks. On a GPU or TPU the products read them there; on
a CPU they are copied first, which takes longer than a product of few rows. Here each product is one
of a conditional's branches, a layer each, which hold nothing else: what surrounds them is compiled
once, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np

from jax_specdec.device.model.layer_weights import ArrayALayer, OfLayer
from jax_specdec.device.model.params import LayerParams, ModelParams

MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


def with_array_a_layer(params: Any) -> Any:
    """The same `ModelParams`, whose layers' matrices are arrays; those that are stay as they are.

    On a CPU no weight is copied that begins where jax can take it over. Of shapes alone, which
    need no memory, the result has shapes.
    """
    draft = params.draft
    if isinstance(draft, ModelParams):
        draft = with_array_a_layer(draft)
    return replace(params, layers=_with_arrays(params.layers), draft=draft)


def _with_arrays(layers: Any) -> Any:
    stacks = {name: getattr(layers, name) for name in MATRICES}
    return replace(
        layers,
        **{
            name: ArrayALayer(_arrays_of(stack))
            for name, stack in stacks.items()
            if not isinstance(stack, ArrayALayer)
        },
    )


def _arrays_of(stack: jax.Array | jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    if isinstance(stack, jax.ShapeDtypeStruct):
        array = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
        return (array,) * int(stack.shape[0])
    in_host: np.ndarray = np.asarray(stack)  # the array's own memory
    return tuple(jax.device_put(in_host[layer]) for layer in range(stack.shape[0]))


def stacks_of(layers: LayerParams) -> dict[str, jax.Array]:
    """The arrays that a scan over layers maps over, by name: [L, ...] each."""
    weights = {field.name: getattr(layers, field.name) for field in fields(layers)}
    return {name: x for name, x in weights.items() if isinstance(x, jax.Array)}


def of_layer(stacked: dict[str, jax.Array], layers: LayerParams, layer: jax.Array) -> LayerParams:
    """One layer: of what a scan maps over, and of the weights that are no stacks."""
    weights = {field.name: getattr(layers, field.name) for field in fields(layers)}
    chosen = {
        name: OfLayer(x.arrays, layer) for name, x in weights.items() if isinstance(x, ArrayALayer)
    }
    return LayerParams(**{**weights, **stacked, **chosen})
