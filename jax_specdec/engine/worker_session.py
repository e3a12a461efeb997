"""One worker as the engine uses it: its ring, its slots, and whose requests are in them.

The edge around `output_processor`, whose state is a value; here it is replaced message by message.
Never jax.
"""

import collections
import time
from dataclasses import dataclass, replace
from typing import Protocol

from ipc import ReceivedMessage, RingCounters, RingReader, RingTimeout
from ipc.wire import Kind
from jax_specdec.control import Admit, Command, Evict, Release
from jax_specdec.engine.queued_request import QueuedRequest, TokenLog
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.records import output_processor
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import Message, decode
from jax_specdec.records.output_processor import ProcessorState, Progress
from jax_specdec.records.record import Records
from jax_specdec.records.statistics import Counters, Statistics


class WorkerHandle(Protocol):
    """What a rank needs of its worker; `WorkerProcess`, or something else in a test."""

    @property
    def ring(self) -> RingReader: ...

    @property
    def pid(self) -> int: ...

    def tell(self, command: Command, /) -> None: ...

    def failure(self, cause: Exception, /) -> WorkerFailed: ...

    def stop(self, *, drain: bool) -> int: ...


@dataclass(frozen=True)
class Update:
    """What one message brought, or what became of requests without one.

    Attributes:
      message: None for records that no message caused: an abort, a lost worker.
      received: the message as it came out of the ring.
      records: in the order in which they belong. One without a finish reason is not its request's
        last one, also where it says `reschedule` or hands drafts over: the engine goes on.
      process_rank: whose message or loss it is; None where the request held no slot.
      lost: why this rank's worker ended, in the update that reports it.
    """

    message: Message | None
    received: ReceivedMessage | None
    records: Records
    process_rank: int | None = None
    lost: WorkerFailed | None = None

    @property
    def latency_ns(self) -> int | None:
        """From the worker's commit to the engine's own copy, nanoseconds."""
        if self.received is None:
            return None
        return self.received.receive_time_ns - self.received.send_time_ns


@dataclass(frozen=True)
class WorkerStatus:
    """One rank's numbers at one moment.

    Attributes:
      process_rank: its number, as in its messages.
      prefill_only: whether it hands requests over after their first token.
      pid: of its worker.
      alive: whether its worker may still send; False once it was reported lost.
      restarts: workers that were started in place of a lost one.
      request_ids: of the requests that hold a slot, in order of admission.
      ring: of the ring to its current worker.
      processor: what was not delivered, and why; over all of its workers.
      statistics: acceptance; over all of its workers.
    """

    process_rank: int
    prefill_only: bool
    pid: int
    alive: bool
    restarts: int
    request_ids: tuple[str, ...]
    ring: RingCounters
    processor: Counters
    statistics: Statistics


class WorkerSession:
    """A worker, its ring and what the engine knows about it.

    Attributes:
      worker: the current one.
      state: the processor's, for this ring.
      prefill_only: its requests end here after their first token.
      lost: why its worker ended; None while it runs.
      restarts: workers that were started in place of a lost one.
    """

    def __init__(
        self,
        worker: WorkerHandle,
        *,
        num_slots: int,
        max_length: int,
        process_rank: int = 0,
        prefill_only: bool = False,
        first_generation: int = 0,
        rehearse: bool = False,
    ) -> None:
        """Start with empty slots.

        Args:
          first_generation: the slots' first requests get the one after it.
          rehearse: take the last message once more, into nothing, before the next is expected.
        """
        self.worker = worker
        self.state = ProcessorState.empty(num_slots, process_rank=process_rank)
        self.prefill_only = prefill_only
        self.lost: WorkerFailed | None = None
        self.restarts = 0
        self._generations = [first_generation] * num_slots
        # The one that was freed first is taken first: prompts stay in the others' caches longer.
        self._free = collections.deque(range(num_slots))
        self._slots: dict[str, int] = {}  # request id to slot, in order of admission
        self._log = TokenLog(num_slots, max_length)
        self._heard = 0.0  # when it last sent something, or got something to do
        self._rehearsed = self._rehearse if rehearse else None
        self._last: tuple[ProcessorState, bytes] | None = None  # the message, and what was before

    @property
    def process_rank(self) -> int:
        return self.state.process_rank

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Those that hold a slot, in order of admission."""
        return tuple(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def status(self) -> WorkerStatus:
        return WorkerStatus(
            process_rank=self.process_rank,
            prefill_only=self.prefill_only,
            pid=self.worker.pid,
            alive=self.lost is None,
            restarts=self.restarts,
            request_ids=self.request_ids,
            ring=self.worker.ring.counters(),
            processor=self.state.counters,
            statistics=self.state.statistics,
        )

    def admit(self, job: QueuedRequest) -> None:
        """Give a free slot to a request, under a new generation."""
        if not self._slots:
            self._heard = time.monotonic()
        slot, request = self._free.popleft(), job.request
        generation = self._generations[slot] = (self._generations[slot] + 1) & 0xFFFFFFFF
        self.state = output_processor.admit(
            self.state,
            slot,
            generation,
            request,
            prefill=self.prefill_only,
            handed_over=job.progress,
        )
        self._slots[request.id] = slot
        self._log.start(slot, job.progress.token_ids)
        self.worker.tell(
            Admit(
                slot=slot,
                generation=generation,
                request=job.for_worker,
                draft_token_ids=job.draft_token_ids,
            )
        )

    @property
    def silence(self) -> float:
        """Seconds since the worker last sent something, while it had requests; 0 without any."""
        return time.monotonic() - self._heard if self._slots else 0.0

    def evict(self, request_id: str, *, reschedule: bool) -> None:
        """Ask the worker for the request's slot; the answer is a record."""
        slot = self._slots[request_id]
        generation = self._generations[slot]
        self.worker.tell(Evict(slot=slot, generation=generation, reschedule=reschedule))

    def receive(self, timeout: float) -> Update | None:
        """The next message; None if none came within `timeout` seconds (0: look once).

        Raises:
          RingError: the worker is gone, or its ring cannot be trusted.
          MessageError, ProcessorError: the message cannot be.
        """
        try:
            received = (
                self.worker.ring.receive(timeout, rehearse=self._rehearsed)
                if timeout
                else self.worker.ring.try_receive()
            )
        except RingTimeout:
            return None
        if received is None:
            return None
        self._heard = time.monotonic()
        before, message = self.state, decode(received.data)
        self.state, records = output_processor.step(before, message)
        if self._rehearsed is not None and message.kind is Kind.TARGET:  # what pauses end with
            self._last = before, received.data
        self._log.extend(records)
        return Update(message, received, records, self.process_rank)

    def _rehearse(self) -> None:
        """Nothing comes of it: both functions are pure, and went well with these arguments."""
        if self._last is not None:
            state, data = self._last
            output_processor.step(state, decode(data))

    def abort(self, request_id: str) -> Records:
        """The record that ends a request; none if its last one is on its way."""
        self.state, records = output_processor.abort(self.state, request_id)
        self._log.extend(records)
        return records

    def flush(self, reason: FinishReason | None = None) -> Records:
        """The records that wait, as nothing more comes; with a reason, every request ends."""
        self.state, records = output_processor.flush(self.state, reason)
        self._log.extend(records)
        return records

    def leave(self, request_id: str) -> QueuedRequest:
        """Free the request's slot; returns how far the request has come."""
        slot = self._slots.pop(request_id)
        request = self.state.admitted.requests[slot]
        assert request is not None  # every live request was admitted
        cumulative = float(self.state.columns.cumulative_logprob[slot])
        prompt_rows = max(
            self.state.columns.num_prompt[slot], self.state.admitted.prompt_before[slot]
        )
        job = QueuedRequest(
            request=request,
            progress=Progress(
                token_ids=self._log.tokens(slot),
                cumulative_logprob=cumulative if request.params.num_columns else None,
                statistics=self.state.slot_statistics(slot),
                num_prompt_rows=int(prompt_rows),
            ),
        )
        self.state = output_processor.release(self.state, slot)
        self.worker.tell(Release(slot=slot, generation=self._generations[slot]))
        self._free.append(slot)
        if not self._slots:
            self._last = None  # nothing is expected: keep no message, and no prompt, for it
        return job

    def restart(self, worker: WorkerHandle) -> None:
        """Go on with a new worker, whose steps are numbered from 0; no request may be live."""
        assert not self._slots
        fresh = ProcessorState.empty(self.state.num_slots, process_rank=self.process_rank)
        self.state = replace(fresh, past=self.state.statistics, counters=self.state.counters)
        self.worker, self.lost, self._last = worker, None, None
        self.restarts += 1
