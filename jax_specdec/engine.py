"""The engine: a process without jax that feeds a model worker and delivers its records.

It owns the slots: it admits a request into a slot under a new generation, releases the slot when
the request's last record is out, and gives it to the next one. Commands go to the worker as lines
on its standard input; everything else comes back through shared memory.

The pure parts are elsewhere (`output_processor`); this is the edge with processes and clocks.
"""

import collections
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from ipc import wire
from ipc.errors import EndOfStream, PeerDied, RingError, RingTimeout
from ipc.ring import ReceivedMessage, RingReader
from jax_specdec import output_processor
from jax_specdec.control import Admit, Command, Release, Shutdown, Start, to_line
from jax_specdec.decode import Message, decode
from jax_specdec.output_processor import ProcessorState
from jax_specdec.records import FinishReason, Records
from jax_specdec.requests import Request, RequestError

PATIENCE_SECONDS = 5.0  # for a worker that was told to stop
HEARTBEAT_SECONDS = 0.25  # between two looks at a worker that sends nothing


class WorkerFailed(RuntimeError):
    """The worker ended before its requests did; carries what it printed last."""


class NotServed(RequestError):
    """A request that is valid but asks for something that this worker does not do."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to run; sizes are checked when the engine starts.

    Attributes:
      drafter: "mtp", "ngram" or "none".
      num_drafts: draft tokens a step at most.
      num_slots: requests that decode together.
      max_length: prompt and emitted tokens of a request.
      vocab_size: ids below it are legal in a prompt.
      weights: a safetensors file; empty for the weights that come with the package.
      prefill_chunk: prompt tokens that run between two steps.
      ring_slots: messages that may wait for the engine.
    """

    drafter: str = "mtp"
    num_drafts: int = 3
    num_slots: int = 8
    max_length: int = 512
    vocab_size: int
    weights: str = ""
    prefill_chunk: int = 64
    ring_slots: int = 16

    def __post_init__(self) -> None:
        for name, low in (("num_drafts", 0), ("num_slots", 1), ("max_length", 2)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {low}")

    @property
    def message_bytes(self) -> int:
        """The largest message that a step can make."""
        tokens = [self.num_drafts + 1] * self.num_slots
        columns = [wire.MAX_TOP_K + 1] * self.num_slots
        chosen = [wire.MAX_CHOSEN] * self.num_slots
        return wire.WORD_BYTES * wire.words_bound(tokens, columns, chosen)


@dataclass(frozen=True)
class Update:
    """What one message brought."""

    message: Message | None  # None for records that close a lost worker's requests
    received: ReceivedMessage | None
    records: Records

    @property
    def latency_ns(self) -> int | None:
        """From the worker's commit to the engine's own copy, nanoseconds."""
        if self.received is None:
            return None
        return self.received.receive_time_ns - self.received.send_time_ns


def check(request: Request, config: EngineConfig) -> None:
    """Refuse what cannot be served, before any of it reaches the worker.

    Raises:
      RequestError: a prompt id outside the vocabulary, or more tokens than a slot holds.
      NotServed: a mode or a feature that this worker does not do.
    """
    params, ids = request.params, request.prompt_token_ids
    if not 0 <= min(ids) <= max(ids) < config.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < config.vocab_size)
        raise RequestError(
            f"request {request.id!r}: prompt token id {wrong} is outside the vocabulary "
            f"(0 to {config.vocab_size - 1})"
        )
    if len(ids) + params.max_tokens > config.max_length:
        raise RequestError(
            f"request {request.id!r}: {len(ids)} prompt tokens and max_tokens = "
            f"{params.max_tokens} exceed the {config.max_length} tokens of a slot; "
            "shorten one of them or raise max_length"
        )
    if params.logprobs is not None and params.logprobs > config.vocab_size:
        raise RequestError(
            f"request {request.id!r}: logprobs = {params.logprobs}, but the vocabulary has only "
            f"{config.vocab_size} tokens"
        )
    if params.logprobs_mode is not wire.LogprobsMode.RAW:
        raise NotServed(
            f"request {request.id!r}: logprobs mode {params.logprobs_mode.name.lower()} is not "
            "served yet; ask for raw"
        )
    if params.extra_token_ids:
        raise NotServed(f"request {request.id!r}: extra_token_ids are not served yet")
    if params.draft_logprobs:
        raise NotServed(f"request {request.id!r}: draft_logprobs are not served yet")


class WorkerProcess:
    """A model worker that was started, and the ring that it sends on."""

    def __init__(self, config: EngineConfig) -> None:
        self.ring = RingReader.create(config.ring_slots, config.message_bytes)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jax_specdec.worker_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,  # a terminal's Ctrl-C reaches the engine, which decides
            )
        except BaseException:
            self.ring.close()
            raise
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self._stdin, self._stderr = self.process.stdin, self.process.stderr
        self.ring.expect_peer(self.process.pid)
        # A pipe that nobody reads would block the worker once it is full.
        self._last_lines: collections.deque[str] = collections.deque(maxlen=50)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.tell(
            Start(
                ring=self.ring.name,
                weights=config.weights,
                drafter=config.drafter,
                num_drafts=config.num_drafts,
                num_slots=config.num_slots,
                max_length=config.max_length,
                prefill_chunk=config.prefill_chunk,
            )
        )

    def tell(self, command: Command) -> None:
        """Send a command; a worker that is gone is noticed where its messages are read."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: closed by `stop`
            self._stdin.write(to_line(command))
            self._stdin.flush()

    def failure(self, cause: Exception) -> WorkerFailed:
        """Why the worker ended, in its own words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_SECONDS)  # its stream has ended: it is about to
        code = self.stop(drain=False)
        last = "".join(self._last_lines).strip()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return WorkerFailed(
            f"the model worker (pid {self.process.pid}) {how} before its requests were done: "
            f"{cause}\n" + (f"its last words:\n{last}" if last else "it printed nothing")
        )

    def stop(self, *, drain: bool) -> int:
        """End the worker and the ring; returns its exit status. Calling it again does nothing.

        Args:
          drain: let it publish what it has computed; otherwise it is ended at once.
        """
        self.tell(Shutdown())
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        if drain:
            with contextlib.suppress(RingError):  # the end of the stream, or a worker that hangs
                while True:
                    self.ring.receive(PATIENCE_SECONDS)
        elif self.process.poll() is None:
            self.process.terminate()
        self.ring.close()
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join(PATIENCE_SECONDS)
        self._stderr.close()
        return self.process.returncode

    def _listen(self) -> None:
        for line in self._stderr:
            self._last_lines.append(line)


@dataclass
class Rank:
    """One worker, its ring and what the engine knows about it."""

    worker: WorkerProcess
    state: ProcessorState
    free: list[int]
    generations: list[int]
    live: dict[str, int] = field(default_factory=dict)  # request id to slot


class Engine:
    """Runs requests on its workers; use it as a context manager."""

    def __init__(self, config: EngineConfig, *, num_ranks: int = 1) -> None:
        """Start `num_ranks` workers, each with a ring and slots of its own."""
        self.config = config
        self.ranks: list[Rank] = []
        try:
            for _ in range(num_ranks):
                slots = config.num_slots
                self.ranks.append(
                    Rank(
                        worker=WorkerProcess(config),
                        state=ProcessorState.empty(slots),
                        free=list(range(slots))[::-1],
                        generations=[0] * slots,
                    )
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def close(self, *, drain: bool = False) -> None:
        """Stop every worker; nothing stays in shared memory."""
        for rank in self.ranks:
            rank.worker.stop(drain=drain)

    def generate(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run `requests`, as many at once as there are slots; yields what each message brought.

        Raises:
          RequestError: one of them cannot be served; none was started then.
          WorkerFailed: a worker ended early; the records that close its requests came before.
        """
        for request in requests:
            check(request, self.config)
        names = collections.Counter(request.id for request in requests)
        if twice := [name for name, count in names.items() if count > 1]:
            raise RequestError(f"request ids must differ: {twice[0]!r} occurs twice")
        waiting = collections.deque(requests)
        while waiting or any(rank.live for rank in self.ranks):
            for rank in self.ranks:
                while waiting and rank.free:
                    self._admit(rank, waiting.popleft())
            yield from self._receive()

    def _admit(self, rank: Rank, request: Request) -> None:
        slot = rank.free.pop()
        rank.generations[slot] = (rank.generations[slot] + 1) & 0xFFFFFFFF
        generation = rank.generations[slot]
        rank.state = output_processor.admit(rank.state, slot, generation, request)
        rank.live[request.id] = slot
        rank.worker.tell(Admit(slot=slot, generation=generation, request=request))

    def _receive(self) -> Iterator[Update]:
        """The next message of each ring that has one; waits where there is a single ring."""
        busy = [rank for rank in self.ranks if rank.live]
        for rank in busy:
            try:
                received = rank.worker.ring.receive(HEARTBEAT_SECONDS / len(busy))
            except RingTimeout:
                continue
            except (PeerDied, EndOfStream) as error:
                rank.state, records = output_processor.flush(
                    rank.state, reason=FinishReason.WORKER_LOST
                )
                yield from self._deliver(rank, None, None, records)
                raise rank.worker.failure(error) from error
            message = decode(received.data)
            rank.state, records = output_processor.step(rank.state, message)
            yield from self._deliver(rank, message, received, records)

    def _deliver(
        self,
        rank: Rank,
        message: Message | None,
        received: ReceivedMessage | None,
        records: Records,
    ) -> Iterator[Update]:
        for record in records.events():
            if record.reschedule:
                raise NotServed(f"request {record.request_id!r} was preempted: not served yet")
            slot = rank.live.pop(record.request_id)
            rank.state = output_processor.release(rank.state, slot)
            rank.worker.tell(Release(slot=slot, generation=rank.generations[slot]))
            rank.free.append(slot)
        yield Update(message, received, records)
