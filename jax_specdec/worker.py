"""The model worker: it keeps the slots decoding and publishes one message a step.

It launches step n + 1 before it reads step n, so the device never waits for the host: while the
device computes, the host takes commands, waits for the copy of the last step's words and sends
them. Everything that step n + 1 needs from step n stays on the device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ipc import wire
from ipc.wire import SlotState
from jax_specdec import loop
from jax_specdec.control import Admit, Command, Release, Shutdown
from jax_specdec.decode import failed_checks
from jax_specdec.model import ModelParams
from jax_specdec.pack import bucket, k_bucket
from jax_specdec.requests import Request, check_served
from jax_specdec.sampling import Sampling
from pallas_kernels.implementations import cannot_run, cuda_capability


class DeviceCheckError(RuntimeError):
    """A check on the device failed while a message was packed: the message is not sent."""


class Sender(Protocol):
    """Where messages go; the ring, or a list in a test."""

    def send(self, data: np.ndarray, /) -> object: ...


@dataclass
class Slot:
    """What the host knows of a slot: enough to bound a step's message when it is launched."""

    generation: int = 0
    columns: int = 0
    greedy: bool = True
    most_tokens: int = 0  # a step; 0 while nothing can be emitted
    prefill_at: int | None = None  # next prompt token to run; None when none is left
    prompt_length: int = 0

    @property
    def occupied(self) -> bool:
        return self.most_tokens > 0


@dataclass
class Compiled:
    """The loop's functions, compiled on first use."""

    config: loop.LoopConfig
    admit: Callable[..., loop.LoopState] = field(init=False)
    release: Callable[..., loop.LoopState] = field(init=False)
    prefill_chunk: Callable[..., loop.LoopState] = field(init=False)
    step: Callable[..., tuple[loop.LoopState, loop.StepOutput]] = field(init=False)
    message: Callable[..., jax.Array] = field(init=False)
    leading: Callable[..., jax.Array] = field(init=False)

    def __post_init__(self) -> None:
        # The state is donated: a step updates the caches in place.
        self.admit = jax.jit(loop.admit, donate_argnums=0)
        self.release = jax.jit(loop.release, donate_argnums=0)
        self.prefill_chunk = jax.jit(
            functools.partial(loop.prefill_chunk, self.config),
            donate_argnums=1,
            static_argnames="chunk",
        )
        self.step = jax.jit(
            functools.partial(loop.step, self.config),
            donate_argnums=1,
            static_argnames="fused_k",
        )
        self.message = jax.jit(loop.message, static_argnames=("k", "num_words", "process_rank"))
        self.leading = jax.jit(lambda words, count: words[:count], static_argnums=1)


class Worker:
    """Slots, the device state, and at most one step that is launched but not yet published."""

    def __init__(
        self,
        config: loop.LoopConfig,
        params: ModelParams,
        sender: Sender,
        *,
        prefill_chunk: int = 64,
        process_rank: int = 0,
        compiled: Compiled | None = None,
        fused: bool | None = None,
    ) -> None:
        """Start with empty slots.

        Args:
          compiled: share it among workers of one configuration.
          fused: let greedy verification and logprobs share one read where that pays; None: where
            the GPU kernels run.
        """
        self.config = config
        self.params = params
        self.sender = sender
        self.prefill_chunk = prefill_chunk
        self.process_rank = process_rank
        self.compiled = compiled or Compiled(config)
        self.state = loop.init_state(config)
        self.fused = runs_on_gpu(config) if fused is None else fused
        self.slots = [Slot() for _ in range(config.num_slots)]
        self.step_number = 0  # of the next step; published steps have consecutive numbers
        self.launched: jax.Array | None = None  # the words of a step that is under way

    @property
    def busy(self) -> bool:
        """Whether anything is left to launch or to publish."""
        return self.launched is not None or any(slot.occupied for slot in self.slots)

    def apply(self, command: Command) -> bool:
        """Carry out one command between two steps; False to stop."""
        if isinstance(command, Admit):
            self._admit(command)
        elif isinstance(command, Release):
            slot = self.slots[command.slot]
            if slot.generation == command.generation and slot.occupied:
                self.state = self.compiled.release(self.state, jnp.int32(command.slot))
                self.slots[command.slot] = Slot(generation=command.generation)
        else:
            return not isinstance(command, Shutdown)
        return True

    def advance(self) -> None:
        """Launch the next step, then publish the one before it."""
        for index, slot in enumerate(self.slots):
            if slot.occupied and slot.prefill_at is not None:
                self._prefill(index, slot)
        decoding = any(slot.occupied and slot.prefill_at is None for slot in self.slots)
        following = self._launch() if decoding else None
        self.finish()
        self.launched = following

    def finish(self) -> None:
        """Publish the step that is under way, and launch no other."""
        if self.launched is not None:
            self._publish(self.launched)
        self.launched = None

    def _admit(self, command: Admit) -> None:
        request, length = command.request, self.config.max_length
        check_served(request)
        most = min(self.config.drafter.num_drafts, request.params.max_tokens - 1)
        self.state = self.compiled.admit(
            self.state, jnp.int32(command.slot), admission(request, length, most)
        )
        self.slots[command.slot] = Slot(
            generation=command.generation,
            columns=request.params.columns,
            greedy=request.params.temperature == 0,
            most_tokens=most + 1,
            prefill_at=0,
            prompt_length=len(request.prompt_token_ids),
        )

    def _prefill(self, index: int, slot: Slot) -> None:
        """Run one chunk of a prompt: a long one does not hold up the other slots' tokens."""
        start = slot.prefill_at or 0
        self.state = self.compiled.prefill_chunk(
            self.params, self.state, jnp.int32(index), jnp.int32(start), chunk=self.prefill_chunk
        )
        following = start + self.prefill_chunk
        slot.prefill_at = following if following < slot.prompt_length - 1 else None

    def _launch(self) -> jax.Array:
        """Start a step and the copy of its message; what the host knows now bounds its size."""
        columns = np.array([slot.columns for slot in self.slots], np.int32)
        generations = np.array([slot.generation for slot in self.slots], np.uint32)
        tokens = [0 if slot.prefill_at is not None else slot.most_tokens for slot in self.slots]
        bound = wire.words_bound(tokens, columns, [0] * len(tokens))
        asked = [slot.columns for slot in self.slots if slot.columns]
        k = k_bucket(max(asked) - 1, self.config.model.vocab_size) if asked else None
        fused_k = k if self.fused and self._mostly_greedy_logprobs() else None
        self.state, output = self.compiled.step(self.params, self.state, fused_k=fused_k)
        number = self.step_number
        words = self.compiled.message(
            output,
            columns,
            generations,
            np.array([number & 0xFFFFFFFF, number >> 32], np.uint32),
            k=k,
            num_words=self._most_words(k),
            process_rank=self.process_rank,
        )
        # Packing compiles once for each K, and only this cut once for each bucket.
        words = self.compiled.leading(words, min(bucket(bound), words.size))
        words.copy_to_host_async()
        self.step_number += 1
        return words

    def _mostly_greedy_logprobs(self) -> bool:
        """Whether one read of every row is cheaper than an argmax and the accepted rows again.

        Every slot must be greedy; and the fused read selects K of rejected rows and of rows that
        nobody asked about too, so half of the slots at least must want logprobs.
        """
        taken = [slot for slot in self.slots if slot.occupied]
        asked = sum(slot.columns > 0 for slot in taken)
        return all(slot.greedy for slot in taken) and 2 * asked >= len(taken)

    def _most_words(self, k: int | None) -> int:
        """The longest message that these slots can make with logprobs up to K."""
        batch, columns = self.config.num_slots, 0 if k is None else k + 1
        return wire.words_bound([self.config.num_positions] * batch, [columns] * batch, [0] * batch)

    def _publish(self, launched: jax.Array) -> None:
        words = np.asarray(launched)
        num_words = int(wire.HEADER["num_words"].get(words))
        if num_words > words.size:
            raise DeviceCheckError(
                f"a message of {num_words} words is longer than the {words.size} that its slots "
                "can fill; nothing of it was sent"
            )
        if wire.HEADER["error"].get(words):
            checks = int(wire.HEADER["error_checks"].get(words))
            step = int(wire.HEADER["step_low"].get(words))
            raise DeviceCheckError(
                f"step {step} failed its checks on the device ({', '.join(failed_checks(checks))});"
                " nothing of it was sent"
            )
        self.sender.send(words[:num_words])
        fields = words[wire.HEADER_WORDS :][: wire.SLOT_WORDS * len(self.slots)]
        fields = fields.reshape(len(self.slots), wire.SLOT_WORDS)
        stopped = wire.SLOT["state"].get(fields) == SlotState.STOPPED
        for index in np.flatnonzero(stopped).tolist():
            generation = int(wire.SLOT["generation"].get(fields[index]))
            if generation == self.slots[index].generation:  # not of a request that came since
                self.slots[index] = Slot(generation=generation)


def runs_on_gpu(config: loop.LoopConfig) -> bool:
    """Whether this model's logits go through the GPU kernels."""
    shape = (config.num_slots * config.num_positions, config.model.vocab_size)
    logits = jax.eval_shape(lambda: jnp.zeros(shape, jnp.dtype(config.model.dtype)))
    return cannot_run(logits, cuda_capability()) is None


def admission(request: Request, max_length: int, max_drafts: int) -> loop.Admission:
    """The device's view of a request; stop ids beyond `MAX_STOP_IDS` are the engine's to see."""
    params = request.params
    tokens = np.zeros(max_length, np.int32)
    tokens[: len(request.prompt_token_ids)] = request.prompt_token_ids
    stop_ids = np.full(loop.MAX_STOP_IDS, -1, np.int32)
    watched = params.stop_token_ids[: loop.MAX_STOP_IDS]
    stop_ids[: len(watched)] = watched
    return loop.Admission(
        tokens=jnp.asarray(tokens),
        length=jnp.int32(len(request.prompt_token_ids)),
        max_tokens=jnp.int32(params.max_tokens),
        max_drafts=jnp.int32(max_drafts),
        stop_ids=jnp.asarray(stop_ids),
        sampling=Sampling(
            temperature=jnp.float32(params.temperature),
            top_k=jnp.int32(params.top_k),
            top_p=jnp.float32(params.top_p),
            min_p=jnp.float32(params.min_p),
            seed=jnp.uint32(params.seed),
        ),
    )
