"""One worker as the engine uses it: its ring, its slots, and the requests in them.

`output_processor` works on frozen states; a `WorkerSession` holds the current one and replaces it
with every message.
"""

import logging
from dataclasses import replace

from ipc import RingTimeout, wire
from ipc.wire import Kind
from jax_specdec.control import (
    Admit,
    Evict,
    Heartbeat,
    Liveness,
    QuietTimer,
    Release,
)
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.queued_request import QueuedRequest, TokenLog
from jax_specdec.engine.timings import SlotTimes, Timings
from jax_specdec.engine.updates import Update, WorkerStatus
from jax_specdec.engine.worker_client import WorkerProcess
from jax_specdec.records import output_processor
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import decode
from jax_specdec.records.output_processor import ProcessorState, Progress
from jax_specdec.records.record import Records

# Steps with tokens after which a request is not to blame for an earlier loss: it goes on where it
# was then, and would have done the same again. A worker is a step ahead of what it has published.
GETS_ON_STEPS = 8
logger = logging.getLogger("jax_specdec.engine")

WORKER_START_SECONDS = (
    60.0  # until a process's first heartbeat: Python starts, on a busy machine perhaps
)


class WorkerSilent(RuntimeError):
    """A worker sent no heartbeat, or made no progress, for too long."""


class WorkerSession:
    """A worker, its ring and what the engine knows about them; it outlives a restarted worker.

    Attributes:
      worker: the current worker.
      state: the output processor's state for this ring.
      prefill_only: requests end here after their first token.
      ending: the error by which the worker was found lost; None while it runs.
      lost: why the worker ended, once that is known.
      restarts: workers that were started in place of a lost one.
    """

    def __init__(
        self,
        worker: WorkerProcess,
        config: EngineConfig,
        *,
        process_rank: int = 0,
        prefill_only: bool = False,
        first_generation: int = 0,
    ) -> None:
        """Start with empty slots.

        Args:
          worker: `WorkerProcess`, or a test's own. Only its `stop` may wait.
          config: what it runs.
          first_generation: the slots' first requests get the generation after this one.
        """
        num_slots = config.num_slots
        self.worker = worker
        self.state = ProcessorState.empty(
            num_slots, process_rank=process_rank, num_drafts=config.num_drafts
        )
        self.prefill_only = prefill_only
        self.ending: Exception | None = None
        self.lost: WorkerFailed | None = None
        self.restarts = 0
        self.generations = [first_generation] * num_slots
        self.free_slots = list(range(num_slots))  # the one that was freed first stands first
        self._prompts = [b""] * num_slots  # what was put into each slot last
        self._chunk_bytes = config.prefill_chunk * wire.WORD_BYTES
        self.slots: dict[str, int] = {}  # request id to slot, in order of admission
        self._log = TokenLog(num_slots, config.max_length)
        self._queued: dict[int, QueuedRequest] = {}  # by slot: what was admitted
        self._times = SlotTimes(num_slots)
        self._numbers = [0] * num_slots  # of the admissions, among the commands
        self._heartbeat = Heartbeat()  # the last one that was looked at
        self._began: float | None = None  # when this worker was looked at first
        self.liveness, self._progress = (
            Liveness(worker.pid, grace=WORKER_START_SECONDS),
            QuietTimer(),
        )

    @property
    def process_rank(self) -> int:
        return self.state.process_rank

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot, in order of admission."""
        return tuple(self.slots)

    @property
    def groups(self) -> set[str]:
        """The groups of the requests that hold a slot; those without one are not among them."""
        return {queued.group for queued in self._queued.values() if queued.group}

    @property
    def num_free(self) -> int:
        return len(self.free_slots)

    @property
    def alive(self) -> bool:
        """Whether the worker may still send."""
        return self.ending is None and self.lost is None

    @property
    def ready(self) -> bool:
        """Whether the worker takes requests: it lives and has loaded its model."""
        return self.alive and self.worker.heartbeat.ready

    @property
    def status(self) -> WorkerStatus:
        heartbeat = self.worker.heartbeat
        return WorkerStatus(
            process_rank=self.process_rank,
            prefill_only=self.prefill_only,
            pid=self.worker.pid,
            alive=self.alive,
            phase=(str(heartbeat), *heartbeat.members),
            devices=heartbeat.devices,
            given=str(self.worker.share),
            restarts=self.restarts,
            weights_version=heartbeat.weights_version,
            request_ids=self.request_ids,
            ring=self.worker.ring.counters(),
            processor=self.state.counters,
            statistics=self.state.statistics,
        )

    def admit(self, queued: QueuedRequest) -> None:
        """Give a free slot to a request, under a new generation."""
        request = queued.request
        slot = self._take_free(request.packed_prompt)
        generation = self.generations[slot] = (self.generations[slot] + 1) & 0xFFFFFFFF
        self.state = output_processor.admit(
            self.state,
            slot,
            generation,
            request,
            prefill=self.prefill_only,
            handed_over=queued.progress,
        )
        self.slots[request.id] = slot
        self._queued[slot] = queued
        self._times.admit(slot, queued.submitted)
        self._log.start(slot, queued.progress.token_ids)
        self._numbers[slot] = self.worker.tell(
            Admit(
                slot=slot,
                generation=generation,
                request=queued.for_worker,
                draft_token_ids=queued.draft_token_ids,
            )
        )

    def _take_free(self, prompt: bytes) -> int:
        """The free slot whose caches hold most of the prompt; of equals, the one freed first.

        So prompts stay longer in the others' caches.
        """
        size = self._chunk_bytes

        def held(slot: int) -> int:
            before, end = self._prompts[slot], size
            while end <= len(prompt) and before[end - size : end] == prompt[end - size : end]:
                end += size
            return end

        slot = max(self.free_slots, key=held)
        self.free_slots.remove(slot)
        self._prompts[slot] = prompt
        return slot

    def took(self, request_id: str) -> bool:
        """Whether the worker has said that it got the request: otherwise it ran nothing of it."""
        return self.worker.heartbeat.taken >= self._numbers[self.slots[request_id]]

    def gets_on(self, request_id: str) -> bool:
        """Whether the request has made so many steps here that it is not to blame for a loss."""
        return self._log.steps(self.slots[request_id]) >= GETS_ON_STEPS

    def losses(self, request_id: str) -> tuple[int, ...]:
        """The losses that the request may be to blame for: none, once it gets on."""
        return () if self.gets_on(request_id) else self._queued[self.slots[request_id]].losses

    def look(
        self, now: float, *, heartbeat_timeout: float, max_silence: float | None
    ) -> WorkerSilent | None:
        """An error if the worker was silent for too long; `now` in seconds, monotonic."""
        heartbeat, last = self.worker.heartbeat, self._heartbeat
        self._heartbeat = heartbeat
        self._began = now if self._began is None else self._began
        if heartbeat is not last:
            self._log_heartbeat(heartbeat, last, now - self._began)
        beat = heartbeat.beats != last.beats
        moved = heartbeat.progress != last.progress or heartbeat.takes_its_time or not self.slots
        self._progress.look(now, sign=moved)
        if not self.liveness.look(now, beat=beat, limit=heartbeat_timeout):
            return WorkerSilent(f"no heartbeat came for {heartbeat_timeout:g} seconds")
        if max_silence is not None and self._progress.seconds > max_silence:
            return WorkerSilent(
                f"it made no progress for {max_silence:g} seconds (phase: {heartbeat})"
            )
        return None

    def _log_heartbeat(self, heartbeat: Heartbeat, last: Heartbeat, seconds: float) -> None:
        for note in heartbeat.notes_since(last):
            logger.info("process rank %d: %s", self.process_rank, note)
        if heartbeat.ready and not last.ready:
            logger.info(
                "process rank %d takes requests after %.1f s (pid %d; %s)",
                self.process_rank,
                seconds,
                self.worker.pid,
                ", ".join(heartbeat.devices) or "devices unknown",
            )

    def evict(self, request_id: str, *, reschedule: bool) -> None:
        """Ask the worker for the request's slot; it answers with a record."""
        slot = self.slots[request_id]
        generation = self.generations[slot]
        self.worker.tell(Evict(slot=slot, generation=generation, reschedule=reschedule))

    def receive(self, timeout: float) -> Update | None:
        """The next message; None if no message came within `timeout` seconds (0: look once).

        Raises:
          RingError: the worker is gone, or its ring is damaged.
          MessageError, ProcessorError: the message is not valid here.
        """
        try:
            received = (
                self.worker.ring.receive(timeout) if timeout else self.worker.ring.try_receive()
            )
        except RingTimeout:
            return None
        if received is None:
            return None
        self.liveness.hear()
        self._progress.hear()
        message = decode(received.data)
        self.state, records = output_processor.step(self.state, message)
        self._log.extend(records)
        return Update(message, received, records, self.process_rank)

    def measure(self, update: Update, now: float, timings: Timings) -> None:
        """Add what one message tells of time, before its requests leave their slots."""
        if update.latency_ns is not None:
            timings.ring.take(update.latency_ns * 1e-9)
        if update.message is not None and update.message.kind is Kind.TARGET:
            self._times.message(now, timings)
        for batch in update.records.batches:
            has = batch.num_tokens > 0
            if has.any():
                self._times.tokens(batch.slots[has], batch.num_tokens[has], now, timings)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Records:
        """The record that ends a request; empty if its last record is on its way already."""
        self.state, records = output_processor.abort(self.state, request_id, reason)
        self._log.extend(records)
        return records

    def flush(self, reason: FinishReason | None = None) -> Records:
        """The records that wait, as no more messages come; with a reason, every request ends."""
        self.state, records = output_processor.flush(self.state, reason)
        self._log.extend(records)
        return records

    def leave(self, request_id: str) -> QueuedRequest:
        """Free the request's slot; returns the request with its progress."""
        losses = self.losses(request_id)
        slot = self.slots.pop(request_id)
        before = self._queued.pop(slot)
        cumulative = float(self.state.columns.cumulative_logprob[slot])
        prompt_rows = max(
            self.state.columns.num_prompt[slot], self.state.admitted.prompt_before[slot]
        )
        progress = Progress(
            token_ids=self._log.tokens(slot),
            cumulative_logprob=cumulative if before.request.params.num_columns else None,
            statistics=self.state.slot_statistics(slot),
            num_prompt_rows=int(prompt_rows),
        )
        queued = replace(
            before, progress=progress, draft_token_ids=(), losses=losses, had_slot=True,
            submitted=self._times.leave(slot),
        )  # fmt: skip
        self.state = output_processor.release(self.state, slot)
        if self.alive:
            self.worker.tell(Release(slot=slot, generation=self.generations[slot]))
        self.free_slots.append(slot)
        return queued

    def restart(self, worker: WorkerProcess) -> None:
        """Continue with a new worker, whose steps are numbered from 0; no slot may be taken."""
        assert not self.slots
        fresh = ProcessorState.empty(
            self.state.num_slots, process_rank=self.process_rank, num_drafts=self.state.num_drafts
        )
        self.state = fresh._replace(past=self.state.statistics, counters=self.state.counters)
        self.worker, self.ending, self.lost = worker, None, None
        self._heartbeat, self._began = Heartbeat(), None
        self.liveness, self._progress = (
            Liveness(worker.pid, grace=WORKER_START_SECONDS),
            QuietTimer(),
        )
        self.restarts += 1
