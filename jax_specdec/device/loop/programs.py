"""The loop's functions, compiled on first use and shared by the workers of one configuration."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.stages import Wrapped

from jax_specdec.device.loop import prompt_scoring
from jax_specdec.device.loop.kinds import Kind, PromptKind
from jax_specdec.device.loop.prompt_chunks import prefill_chunk
from jax_specdec.device.loop.state import (
    LoopConfig,
    admit,
    copy_prefix,
    release,
    start_again,
    state_shardings,
)
from jax_specdec.device.loop.step import choose, forward_rows, seen, step
from jax_specdec.device.messages import step_messages
from pallas_kernels import use_implementation

Function = TypeVar("Function", bound=Callable[..., Any])

# What every request needs that has two prompt tokens; what others need depends on what they ask.
PROGRAMS = ("admit", "prefill_chunk", "step", "target_message", "leading")


class Compiled:
    """The loop's functions, compiled on first use.

    Attributes:
      config: of the loop.
      admit, release, start_again, copy_prefix, prefill_chunk: return the `LoopState`.
      score_chunk: returns it and a `ScoredChunk`.
      step: returns it and a `StepOutput`.
      seen, forward_rows, choose: the same in parts, for steps with grammars.
      prompt_message, target_message, draft_message: return the words of a message.
      leading: returns the first of them.
    """

    def __init__(self, config: LoopConfig) -> None:
        """Compile nothing yet."""
        # A function of its own each, as JAX keeps what it compiles by function.
        # The state is donated: a step updates the caches in place, where they are.
        self.config = config
        places, parallel = state_shardings(config), config.parallel
        chosen = functools.partial(with_implementation, config.implementation)
        on_state = functools.partial(jax.jit, donate_argnums=0, out_shardings=places)
        with_model = functools.partial(jax.jit, donate_argnums=1)
        static = "widths", "process_rank"
        of_messages: dict[str, Any] = {"parallel": parallel, "digest": config.digest}
        self.admit: Wrapped = on_state(admit)
        self.release: Wrapped = on_state(release)
        self.start_again: Wrapped = on_state(start_again)
        self.copy_prefix: Wrapped = on_state(copy_prefix)
        self.prefill_chunk: Wrapped = with_model(
            functools.partial(chosen(prefill_chunk), config),
            static_argnames="chunk",
            out_shardings=places,
        )
        self.score_chunk: Wrapped = with_model(
            functools.partial(chosen(prompt_scoring.score_chunk), config),
            static_argnames=("chunk", "widths"),
            out_shardings=(places, None),
        )
        self.step: Wrapped = with_model(
            functools.partial(chosen(step), config),
            static_argnames=("read_k", "report_widths", "samples", "num_drafts"),
            out_shardings=(places, None),
        )
        self.seen: Wrapped = jax.jit(
            functools.partial(seen, config),
            out_shardings=parallel.everywhere,  # every process reads it
        )
        self.forward_rows: Wrapped = with_model(
            functools.partial(chosen(forward_rows), config), out_shardings=(places, None)
        )
        self.choose: Wrapped = with_model(
            functools.partial(chosen(choose), config),
            static_argnames=("read_k", "report_widths", "samples"),
            out_shardings=(places, None),
        )
        self.prompt_message: Wrapped = jax.jit(
            functools.partial(chosen(prompt_scoring.prompt_message), digest=config.digest),
            static_argnames=(*static, "vocab_size"),
        )
        self.target_message: Wrapped = jax.jit(
            functools.partial(chosen(step_messages.target_message), **of_messages),
            static_argnames=static,
        )
        self.draft_message: Wrapped = jax.jit(
            functools.partial(chosen(step_messages.draft_message), **of_messages),
            static_argnames=static,
        )
        self.leading: Wrapped = jax.jit(
            functools.partial(leading),
            static_argnums=1,
            out_shardings=parallel.everywhere,  # every process reads them
        )

    def for_kind(self, kind: Kind | PromptKind) -> "Compiled":
        """The functions that batches or prompts of a kind use: here all kinds use the same."""
        return self


def leading(words: jax.Array, count: int) -> jax.Array:
    """The first `count` of the words [n]."""
    return words[:count]


def with_implementation(name: str | None, function: Function) -> Function:
    """The function, whose calls take this implementation; None: that of where it is called."""
    if name is None:
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        with use_implementation(name):
            return function(*arguments, **more)

    return call  # type: ignore[return-value]
