"""A weight of some layers that is no stack of arrays; see `layer_arrays`."""

from typing import NamedTuple, TypeAlias

import jax

from ipc.field_docs import with_field_docs


@with_field_docs
class ArrayALayer(NamedTuple):
    """A weight of L layers.

    Attributes:
      arrays: [L] of [...], one a layer.
    """

    arrays: tuple[jax.Array, ...]


@with_field_docs
class OfLayer(NamedTuple):
    """The weight of one of L layers, which is known when the program runs.

    Attributes:
      arrays: [L] of [...], one a layer.
      layer: [] int32, which one.
    """

    arrays: tuple[jax.Array, ...]
    layer: jax.Array


WeightOfLayers: TypeAlias = ArrayALayer | OfLayer
