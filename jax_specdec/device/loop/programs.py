"""The loop's functions, compiled on first use and shared by the workers of one configuration."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from jax_specdec.device.loop import prompt_scoring
from jax_specdec.device.loop.kinds import Kind, PromptKind
from jax_specdec.device.loop.prompt_chunks import prefill_chunk
from jax_specdec.device.loop.state import (
    LoopConfig,
    LoopState,
    admit,
    copy_prefix,
    release,
    start_again,
    state_shardings,
)
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages import step_messages
from jax_specdec.device.messages.step_messages import StepOutput
from pallas_kernels import use_implementation

Function = TypeVar("Function", bound=Callable[..., Any])

# What every request needs that has two prompt tokens; what others need depends on what they ask.
PROGRAMS = ("admit", "prefill_chunk", "step", "target_message", "leading")


@dataclass
class Compiled:
    """The loop's functions, compiled on first use."""

    config: LoopConfig
    admit: Callable[..., LoopState] = field(init=False)
    release: Callable[..., LoopState] = field(init=False)
    start_again: Callable[..., LoopState] = field(init=False)
    copy_prefix: Callable[..., LoopState] = field(init=False)
    prefill_chunk: Callable[..., LoopState] = field(init=False)
    score_chunk: Callable[..., tuple[LoopState, prompt_scoring.ScoredChunk]] = field(init=False)
    step: Callable[..., tuple[LoopState, StepOutput]] = field(init=False)
    prompt_message: Callable[..., jax.Array] = field(init=False)
    target_message: Callable[..., jax.Array] = field(init=False)
    draft_message: Callable[..., jax.Array] = field(init=False)
    leading: Callable[..., jax.Array] = field(init=False)

    def __post_init__(self) -> None:
        # A function of its own each, as JAX keeps what it compiles by function.
        # The state is donated: a step updates the caches in place, where they are.
        places = state_shardings(self.config)
        chosen = functools.partial(with_implementation, self.config.implementation)
        self.admit = jax.jit(admit, donate_argnums=0, out_shardings=places)
        self.release = jax.jit(release, donate_argnums=0, out_shardings=places)
        self.start_again = jax.jit(start_again, donate_argnums=0, out_shardings=places)
        self.copy_prefix = jax.jit(copy_prefix, donate_argnums=0, out_shardings=places)
        self.prefill_chunk = jax.jit(
            functools.partial(chosen(prefill_chunk), self.config),
            donate_argnums=1,
            static_argnames="chunk",
            out_shardings=places,
        )
        self.score_chunk = jax.jit(
            functools.partial(chosen(prompt_scoring.score_chunk), self.config),
            donate_argnums=1,
            static_argnames=("chunk", "widths"),
            out_shardings=(places, None),
        )
        self.step = jax.jit(
            functools.partial(chosen(step), self.config),
            donate_argnums=1,
            static_argnames=("read_k", "report_widths"),
            out_shardings=(places, None),
        )
        static = ("widths", "process_rank")
        self.prompt_message = jax.jit(
            functools.partial(chosen(prompt_scoring.prompt_message)),
            static_argnames=(*static, "vocab_size"),
        )
        parallel = self.config.parallel
        self.target_message = jax.jit(
            functools.partial(chosen(step_messages.target_message), parallel=parallel),
            static_argnames=static,
        )
        self.draft_message = jax.jit(
            functools.partial(chosen(step_messages.draft_message), parallel=parallel),
            static_argnames=static,
        )
        self.leading = jax.jit(
            functools.partial(leading),
            static_argnums=1,
            out_shardings=parallel.everywhere,  # every process reads them
        )

    def of(self, kind: Kind | PromptKind) -> "Compiled":
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
