"""The loop's functions, compiled on first use and shared by the workers of one configuration."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.stages import Wrapped

from jax_specdec.device.loop import prompt_chunks
from jax_specdec.device.loop.prompt_chunks import prefill_chunk
from jax_specdec.device.loop.state import (
    LoopConfig,
    copy_prefix,
    start_again,
    start_slot,
    state_shardings,
    stop_slot,
)
from jax_specdec.device.loop.step import choose, forward_rows, seen, step
from jax_specdec.device.messages import step_messages
from pallas_kernels import use_implementation

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

OF_STEP = "report_widths", "samples", "num_drafts"
# The static arguments of all functions: no argument that is not has such a name.
STATIC = frozenset((*OF_STEP, "chunk", "widths", "vocab_size"))


class Compiled:
    """The loop's functions, compiled on first use.

    Attributes:
      config: of the loop.
      admit, release, start_again, copy_prefix, prefill_chunk: return the `LoopState`.
      score_chunk: returns it and a `ScoredChunk`.
      step: returns it and a `StepOutput`.
      seen, forward_rows, choose: the same in parts, for steps with grammars.
      prompt_message, target_message, draft_message: return the words of a message.
      leading: returns the first of them, or all where it does not cut.
      cuts: messages are cut to what they can fill before they are copied to the host.
    """

    def __init__(self, config: LoopConfig, *, cuts: bool = True) -> None:
        """Compile nothing yet; arguments as the attributes."""
        # A function of its own each, as JAX keeps what it compiles by function.
        # The state is donated: a step updates the caches in place, where they are.
        self.config = config
        places, parallel = state_shardings(config), config.parallel

        def on_state(function: Callable[..., Any]) -> Wrapped:
            return jax.jit(function, donate_argnums=0, out_shardings=places)

        def of_model(function: Callable[..., Any], *static: str, alone: bool = False) -> Wrapped:
            """Of the weights and the state; it returns the state `alone`, or something more."""
            return jax.jit(
                functools.partial(with_implementation(config.implementation, function), config),
                donate_argnums=1,
                static_argnames=static,
                out_shardings=places if alone else (places, None),
            )

        def message(function: Callable[..., Any], *static: str, **more: Any) -> Wrapped:
            chosen = with_implementation(config.implementation, function)
            return jax.jit(functools.partial(chosen, **more), static_argnames=("widths", *static))

        def read(function: Callable[..., Any], **more: Any) -> Wrapped:
            return jax.jit(function, out_shardings=parallel.everywhere, **more)  # by every process

        self.admit, self.release = on_state(start_slot), on_state(stop_slot)
        self.start_again, self.copy_prefix = on_state(start_again), on_state(copy_prefix)
        self.prefill_chunk = of_model(prefill_chunk, "chunk", alone=True)
        self.score_chunk = of_model(prompt_chunks.score_chunk, "chunk", "widths")
        self.step = of_model(step, *OF_STEP)
        self.forward_rows = of_model(forward_rows)
        self.choose = of_model(choose, *OF_STEP[:-1])
        self.prompt_message = message(prompt_chunks.prompt_message, "vocab_size")
        self.target_message = message(step_messages.target_message, parallel=parallel)
        self.draft_message = message(step_messages.draft_message, parallel=parallel)
        self.seen = read(functools.partial(seen, config))
        self.cuts = cuts
        self.leading: Any = (
            read(functools.partial(_leading), static_argnums=1) if cuts else all_words
        )


def cuts_messages(config: LoopConfig) -> bool:
    """Whether a cut saves anything: not where the host reads a device's memory where it is.

    Each cut is a program more to compile and to run.
    """
    return config.parallel.mesh is not None or jax.default_backend() != "cpu"


def _leading(words: jax.Array, count: int) -> jax.Array:
    """The first `count` of the words [n]."""
    return words[:count]


def all_words(words: jax.Array, count: int) -> jax.Array:
    """All of the words [n], of which the first `count` are read."""
    return words


def with_implementation(
    name: str | None, function: Callable[_Arguments, _Result]
) -> Callable[_Arguments, _Result]:
    """The function, whose calls take this implementation; None: that of where it is called."""
    if name is None:
        return function

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **more: _Arguments.kwargs) -> _Result:
        with use_implementation(name):
            return function(*arguments, **more)

    return call
