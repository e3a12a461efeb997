"""A weight of some layers that is no stack of arrays; see `layer_arrays`."""

from typing import NamedTuple, TypeAlias

import jax


class ArrayALayer(NamedTuple):
    """A weight of L layers."""

    arrays: tuple[jax.Array, ...]  # [L] of [...]


class OfLayer(NamedTuple):
    """The weight of one of L layers, which is known when the program runs."""

    arrays: tuple[jax.Array, ...]
    layer: jax.Array  # [] int32


Apart: TypeAlias = ArrayALayer | OfLayer
