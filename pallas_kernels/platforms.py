"""A choice that is made where a program is lowered: a CUDA host may run a program on its CPU."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

from pallas_kernels.blocks import vary_like

Result = TypeVar("Result")


def lowered_for(
    *arguments: jax.Array | None, default: Callable[..., Result], **others: Callable[..., Result]
) -> Result:
    """What the platform's function returns: `others` by name ("cpu", "cuda"), else `default`.

    All take the arguments and return the same shapes and dtypes. Under `shard_map` the results vary
    over every mesh axis over which an argument does, whichever function is chosen: that is a part
    of their type.
    """

    def varying(function: Callable[..., Result]) -> Callable[..., Result]:
        return lambda *given: vary_like(function(*given), given)

    named = {name: varying(function) for name, function in others.items()}
    chosen: Result = lax.platform_dependent(*arguments, default=varying(default), **named)
    return chosen
