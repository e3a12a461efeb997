"""Which implementation calls take that name none: a context, whose value `jax.jit` knows.

jax holds the value for each thread, and it is a part of the key under which `jax.jit` keeps what it
traced: a function that was compiled under one value is traced again under another.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import jax

from pallas_kernels.lowering import obstacles
from pallas_kernels.lowering.obstacles import Implementation

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_named = jax.make_user_context(None)  # type: ignore[no-untyped-call]


def use_implementation(name: str | None) -> AbstractContextManager[None]:
    """A context in which calls with `implementation=None` take this implementation.

    Everything in `pallas_kernels` and `pallas_kernels.sampling` that has kernels takes part; a call
    that names an implementation of its own keeps it, and XLA does what a backend has no kernel for.
    The value holds for this thread, also while `jax.jit` traces, and is a part of jit's cache key.

        with use_implementation("xla"):  # a way out, if a kernel fails on your device
            out = step(params, logits)

    Args:
      name: "xla", "mosaic_gpu", "mosaic_tpu"; None: kernels wherever they can run, as without it.

    Raises:
      ValueError: there is no such implementation.
    """
    obstacles.check_name(name)
    context: AbstractContextManager[None] = _named(name)
    return context


def resolved(implementation: Implementation | None) -> Implementation | None:
    """The implementation that a call named, else that of the context; None where neither does."""
    found: Implementation | None = _named.value if implementation is None else implementation
    return found


def kept(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function with today's value, for the compiler that calls it later, in any thread."""
    name = _named.value

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **more: Arguments.kwargs) -> Result:
        with _named(name):
            return function(*arguments, **more)

    return call


def gpu_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why a call with `implementation=None` takes no GPU kernel for logits [N, V] on these devices.

    None if it takes them.
    """
    name = resolved(None)
    if name not in (None, "mosaic_gpu"):
        return f"use_implementation({name!r}) is in force"
    return obstacles.cannot_run(logits, obstacles.cuda_capability())
