"""The implementation that calls take: by name, or that of a context.

Calls that name no implementation take that of a context. jax holds its value for each thread, and
it is a part of the key under which `jax.jit` keeps what it traced: a function that was compiled
under one value is traced again under another.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, NoReturn, ParamSpec, TypeVar, get_args

import jax

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def check_name(implementation: str | None) -> None:
    """Raise ValueError if there is no implementation of this name; None is the choice of one."""
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r} is not known; choose one of "
            f"{', '.join(map(repr, get_args(Implementation)))} or None"
        )


def refuse(implementation: str, obstacle: str, cause: Exception | None = None) -> NoReturn:
    """Say why an implementation cannot run."""
    raise NotImplementedError(
        f"implementation = {implementation!r} cannot run: {obstacle}; use 'xla' or None"
    ) from cause


_named = jax.make_user_context(None)


def use_implementation(name: str | None) -> AbstractContextManager[None]:
    """A context in which calls with `implementation=None` take this implementation.

    Everything in `pallas_kernels` and `pallas_kernels.sampling` that has kernels takes part; a call
    that names an implementation of its own keeps it, and XLA does what a backend has no kernel for.
    The value holds for this thread, also while `jax.jit` traces, and is a part of jit's cache key.

        with use_implementation("xla"):  # a way out, if a kernel fails on your device
            out = step(params, logits)

    Args:
      name: "xla", "mosaic_gpu", "mosaic_tpu"; None: kernels where they can run and passed
        `jax-specdec check-device`, as without it.

    Raises:
      ValueError: there is no such implementation.
    """
    check_name(name)
    context: AbstractContextManager[None] = _named(name)
    return context


def in_force() -> Implementation | None:
    """The implementation of the context; None where none is named."""
    name: Implementation | None = _named.value
    return name


def resolved(implementation: Implementation | None) -> Implementation | None:
    """The implementation that a call named, else that of the context; None where neither does."""
    return in_force() if implementation is None else implementation


def bind_implementation(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function with today's value, for the compiler that calls it later, in any thread."""
    name = _named.value

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **more: _Arguments.kwargs) -> _Result:
        with _named(name):
            return function(*arguments, **more)

    return call
