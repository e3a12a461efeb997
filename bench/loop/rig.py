"""The worker's side of the end-to-end benchmark: one contender's loop, measured round by round.

The loop is the product's own `Worker`. Contenders differ in what their requests ask for. An
ablation also replaces one part: the kernel, the message, the transport or the decoder.
"""

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bench.loop.consumer import (
    BYTES,
    CPU,
    GENERATION,
    PROCESSED,
    QUEUE,
    RING,
    ROWS,
    TOKENS,
    Consumer,
    Round,
    end_of_round,
    send,
)
from bench.ring.contenders import SEED_BYTES, Sender
from ipc import RingError, wire
from ipc.wire import LogprobsMode, SlotState
from jax_specdec.control import Admit
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig, LoopState
from jax_specdec.device.messages import step_messages
from jax_specdec.device.messages.batch_options import BatchOptions, Widths
from jax_specdec.device.messages.pack import SentRows
from jax_specdec.device.messages.row_logprobs import picked
from jax_specdec.device.messages.step_messages import StepOutput, target_message
from jax_specdec.device.worker.worker import Worker
from jax_specdec.requests import Request, SamplingParams
from pallas_kernels import TopkLogprobs
from pallas_kernels.testing import plain as reference

WARM_STEPS = 2  # after the prompts, before the clock starts
SETTLE = 6  # at most: steps taken apart and not counted, in which the ring learns their rhythm
PAUSE = 0.001  # seconds for the engine after a step taken apart: a GPU would compute meanwhile


@dataclass(frozen=True)
class Contender:
    """One row of the comparison."""

    name: str
    logprobs: int | None  # K of the requests that ask for logprobs; None: no request asks
    askers: int | None = None  # how many requests ask; None: all
    draft_logprobs: bool = False
    mode: LogprobsMode = LogprobsMode.RAW
    temperature: float = 0.0
    top_p: float = 1.0
    kernel: str = "ours"  # "naive": the plain way
    message_bytes: int | None = None  # a fixed size; None: as long as the content
    transport: str = RING
    design: str = "columns"  # how the engine's side decodes

    def requests(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Request]:
        """A request for each slot."""
        asking = len(prompts) if self.askers is None else self.askers
        return [
            Request(
                id=str(slot),
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(
                    max_tokens=max_tokens,
                    logprobs=self.logprobs if slot < asking else None,
                    logprobs_mode=self.mode,
                    draft_logprobs=self.draft_logprobs,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    seed=slot,
                ),
            )
            for slot, prompt in enumerate(prompts)
        ]


# The figures of one round of one contender, by the names of the table; see `_steps`.
Steps = dict[str, float]
# Of a step taken apart, in ns: when its array existed, when it was published, and launching output.
Span = tuple[int, int, int]


@dataclass
class Meter:
    """A clock between the worker and the transport, and around the functions that launch output."""

    sender: Sender
    message_bytes: int | None
    keeps_messages: bool = False  # whether the transport reads a message after `send`
    dispatch_ns: int = 0  # spent in launching functions since it was set to 0
    sent_ns: list[int] = field(default_factory=list)  # the moment before each message was sent
    words: np.ndarray = field(default_factory=lambda: np.zeros(wire.HEADER_WORDS, np.uint32))

    def __post_init__(self) -> None:
        if self.message_bytes is not None:
            self.fixed = np.zeros(self.message_bytes // wire.WORD_BYTES, np.uint32)

    def send(self, data: np.ndarray, /) -> None:
        """Note the moment, and send the message, at its fixed size if it has one."""
        self.sent_ns.append(time.monotonic_ns())
        self.words = data
        if self.message_bytes is not None:
            self.fixed[: data.size] = data
            # A queue pickles later, in a thread of its own: its array must not change.
            data = self.fixed.copy() if self.keeps_messages else self.fixed
        send(self.sender, data)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose time until it returns is added to `dispatch_ns`; its work may go on."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            result = call(*args, **kwargs)
            self.dispatch_ns += time.perf_counter_ns() - begin
            return result

        return timed

    def all_emit(self) -> bool:
        """Whether every slot had tokens in the last message."""
        num_slots = int(wire.HEADER["num_slots"].get(self.words))
        slots = self.words[wire.HEADER_WORDS :][: num_slots * wire.SLOT_WORDS]
        states = wire.SLOT["state"].get(slots.reshape(num_slots, wire.SLOT_WORDS))
        return num_slots > 0 and bool(np.all(states == SlotState.TOKENS))


class Rig:
    """A worker of one contender, ready to run rounds against the consumer."""

    def __init__(
        self,
        contender: Contender,
        config: LoopConfig,
        params: Any,
        compiled: Compiled,
        consumer: Consumer,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self.contender = contender
        self.consumer = consumer
        self.requests = contender.requests(prompts, config.max_length - max(map(len, prompts)))
        self.start: LoopState | None = None  # after the prompts, once they were run
        self.meter = Meter(
            consumer.senders[contender.transport],
            contender.message_bytes,
            keeps_messages=contender.transport == QUEUE,
        )
        self.worker = Worker(
            config,
            params,
            self.meter,
            prefill_chunk=max(map(len, prompts)),
            compiled=instrumented(compiled, contender, self.meter),
        )

    def run(self, steps: int, apart: int, *, keep: bool = False) -> tuple[Steps, Round]:
        """Run `steps` steps as a server does, then `apart` steps taken apart.

        The first call runs the prompts before.
        """
        try:
            return self._run(steps, apart, keep)
        except RingError:
            self.consumer.end()  # raises with the reason why the consumer ended
            raise

    def _run(self, steps: int, apart: int, keep: bool) -> tuple[Steps, Round]:
        worker, meter = self.worker, self.meter
        if self.start is None:
            self.start = self._prefilled()
        self.consumer.begin(self.contender.transport, self.contender.design, self.requests, keep)
        worker.state = jax.tree.map(jnp.copy, self.start)  # a step donates its state
        for _ in range(WARM_STEPS):
            worker.advance()
        number = worker.step_number
        meter.sent_ns.clear()
        begin = time.perf_counter()
        for _ in range(steps):
            worker.advance()
        elapsed = time.perf_counter() - begin
        if worker.step_number != number + steps or not meter.all_emit():
            raise RuntimeError("a request ended before its round: give it more tokens")
        sent = np.array(meter.sent_ns, np.int64)
        worker.finish()
        settle, spans = min(SETTLE, 2 * apart), []
        if apart:
            with engine_core(self.consumer.pid):
                spans = [self._apart() for _ in range(settle + apart)][settle:]
        end_of_round(meter.sender)
        found = self.consumer.end()
        start = len(found.table) - apart - settle - steps - 1
        # The first message is of the step before; a draft message follows its target message.
        sent = sent[:: len(sent) // steps]
        return _steps(elapsed, sent, found.table, start, spans), found

    def _prefilled(self) -> LoopState:
        """The state after the prompts, where every round starts."""
        worker, meter = self.worker, self.meter
        self.consumer.begin(self.contender.transport, self.contender.design, self.requests)
        for slot, request in enumerate(self.requests):
            worker.apply(Admit(slot=slot, generation=GENERATION, request=request))
        worker.advance()
        worker.advance()
        while not meter.all_emit():
            worker.advance()
        worker.finish()
        end_of_round(meter.sender)
        self.consumer.end()
        return worker.state

    def _apart(self) -> Span:
        """One step, which runs alone."""
        clock = time.monotonic_ns
        self.meter.dispatch_ns = 0
        self.worker.advance()  # launches a step; no earlier one waits to be published
        assert self.worker.launched is not None
        jax.block_until_ready(self.worker.launched.words)
        ready = clock()
        self.worker.finish()
        published = clock()
        time.sleep(PAUSE)
        return ready, published, self.meter.dispatch_ns


@contextmanager
def engine_core(pid: int) -> Iterator[None]:
    """Confine process `pid` to the last core that this one may use, and this one to the others.

    Then the engine's time is its work, and not its wait for a core on which jax computes. With a
    single core nothing happens.
    """

    def confine(process: int, cores: set[int]) -> None:
        for thread in Path("/proc", str(process), "task").iterdir():
            with suppress(ProcessLookupError):  # it may end meanwhile
                os.sched_setaffinity(int(thread.name), cores)

    cores = os.sched_getaffinity(0)
    last = {max(cores)}
    try:
        if len(cores) > 1:
            confine(pid, last)
            confine(os.getpid(), cores - last)
        yield
    finally:
        confine(os.getpid(), cores)
        with suppress(FileNotFoundError):  # it has ended
            confine(pid, cores)


def instrumented(compiled: Compiled, contender: Contender, meter: Meter) -> Compiled:
    """The loop's functions with the contender's part replaced, and timers around the output."""
    result: Any = copy.copy(compiled)  # what replaces a jitted function need not be one
    if contender.kernel == "naive":
        result.target_message = naive_message
    if contender.message_bytes is not None:
        result.leading = lambda words, count: words  # the whole array is copied
    result.target_message = meter.timed(result.target_message)
    result.draft_message = meter.timed(result.draft_message)
    result.leading = meter.timed(result.leading)
    of_contender: Compiled = result
    return of_contender


def _naive(output: StepOutput, *args: Any, widths: Widths) -> jax.Array:
    """`target_message` with logprobs of every row, accepted or not, computed in the plain way."""
    with mock.patch.object(step_messages, "row_logprobs", _naive_rows):
        return target_message(output, *args, widths=widths)


def _naive_rows(
    logits: jax.Array,
    token_ids: jax.Array,
    rows: SentRows,
    _: BatchOptions,
    widths: Widths,
    *__: Any,
    **___: Any,
) -> TopkLogprobs:
    """`row_logprobs` in the plain way."""
    assert widths.k is not None
    ids = jnp.maximum(token_ids.reshape(-1), 0)
    return picked(
        reference.topk_logprobs(logits.reshape(-1, logits.shape[-1]), ids, widths.k), rows
    )


naive_message = jax.jit(_naive, static_argnames="widths")

# The seed system sends a struct of this size for every step, whatever its content.
FIXED_BYTES = SEED_BYTES - 24


def _steps(
    elapsed: float, sent: np.ndarray, table: np.ndarray, start: int, spans: Sequence[Span]
) -> Steps:
    """The figures of a round: "step" in seconds, the medians of its steps in microseconds.

    Args:
      elapsed: seconds of the steps that ran as in a server.
      sent: when the message of each of them was sent, in ns.
      table: the consumer's table. start: the row of the first of them.
      spans: of each step taken apart.
    """
    steps = len(sent)
    running = table[start : start + steps]

    def median(nanoseconds: np.ndarray) -> float:
        return float(np.median(nanoseconds)) * 1e-3

    parts = {}
    if spans:
        ready, published, dispatch = np.array(spans, np.int64).T
        parts = {
            # The worker thread's time for output: launching the message, and publishing it.
            "worker us": median(dispatch + published - ready),
            # Everything after the device array exists, device idle.
            "host us": median(table[-len(spans) :, PROCESSED] - ready),
        }
    return {
        # As a server runs it: step n + 1 is launched before step n is read.
        "step": elapsed / steps,
        "tokens": float(running[:, TOKENS].mean()),  # emitted by a step
        **parts,
        # Sent to processed as the loop runs: the device computes the next step meanwhile.
        "busy us": median(running[:, PROCESSED] - sent),
        # CPU time of the consumer's process in a step as a server runs it.
        "engine CPU us": float(running[-1, CPU] - running[0, CPU]) * 1e-3 / (steps - 1),
        "bytes": float(running[:, BYTES].mean()),  # in all messages of a step
        "rows": float(running[:, ROWS].mean()),  # whose logprobs were sent
    }
