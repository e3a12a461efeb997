"""The engine: a process without jax that feeds model workers and delivers their records.

It admits requests into its workers' slots, reads all their rings in turn, queues preempted requests
again, hands prefilled requests over to decode workers, and decides what becomes of the requests of
a lost worker. Commands and heartbeats travel over the control plane, records through shared memory.
An engine runs in one thread, which never waits for a worker, and serves one `generate` at a time.
"""

import collections
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from ipc import RingError
from jax_specdec.engine.clock import Clock, MonotonicClock
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.placement import Placement
from jax_specdec.engine.queued_request import QueuedRequest, ended, handed_on
from jax_specdec.engine.spans import Spans
from jax_specdec.engine.timings import Timings
from jax_specdec.engine.updates import Update, WorkerStatus
from jax_specdec.engine.worker_client import WorkerProcess, together
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.engine.workers import WAIT_SECONDS, Health, StartWorker, Workers
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.errors import MessageError
from jax_specdec.records.output_processor import ProcessorError
from jax_specdec.records.record import Records
from jax_specdec.requests import Request, RequestError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger("jax_specdec.engine")


class Engine:
    """Runs requests on its workers; use it as a context manager."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_worker: StartWorker = WorkerProcess,
        clock: Clock | None = None,
        tracer: "Tracer | None" = None,
    ) -> None:
        """Start all workers: decode ranks are numbered from 0, prefill ranks come after them.

        Args:
          config: what to run.
          start_worker: starts a worker's process.
          clock: tells the time.
          tracer: of OpenTelemetry (the extra `otel`); makes spans of each request's life, below the
            span that is current where `generate` is iterated over. None: no spans.

        Raises:
          ValueError: there are fewer devices than the workers need.
        """
        self.config = config
        self._clock = clock or MonotonicClock()
        self.timings = Timings()
        self._waiting = Placement()  # requests without a slot
        self._pending: collections.deque[Update] = collections.deque()  # not yielded yet
        self._generating = False
        self._spans = None if tracer is None else Spans(tracer, self._clock)
        self._workers = Workers(config, start_worker, self._clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def close(self, *, drain: bool = False) -> None:
        """Stop every worker and free the shared memory.

        Args:
          drain: let the workers publish what they have computed; otherwise they end at once.
        """
        self._workers.close(drain=drain)

    @property
    def sessions(self) -> list[WorkerSession]:
        """What the engine knows of each worker, by process rank."""
        return self._workers.sessions

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot, worker by worker."""
        return tuple(name for session in self.sessions for name in session.request_ids)

    @property
    def status(self) -> tuple[WorkerStatus, ...]:
        """Every worker's numbers, its ring's included; also after `close`."""
        return tuple(session.status for session in self.sessions)

    def health(self, patience: float = 10.0) -> Health:
        """Whether requests can be served, for a supervisor; any thread may ask, at any time.

        Args:
          patience: seconds that `generate` may be left alone by who iterates over it.
        """
        return self._workers.health(generating=self._generating, patience=patience)

    def generate(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run `requests`, as many at once as there are slots; yields what each message brought.

        `abort` and `preempt` may be called between two updates. A caller that stops iterating early
        gives up the requests that are left; the engine can then run others.

        Raises:
          RequestError: one of the requests cannot be served; then no request was started.
          WorkerFailed: a worker ended early or sent an invalid message, and `on_worker_loss` stops
            the engine or no decode worker is left; it names every worker that is lost by then. The
            updates before it closed every request, those that had not begun too.
        """
        for request in requests:
            check(request, self.config)
        names = collections.Counter(request.id for request in requests)
        if twice := [name for name, count in names.items() if count > 1]:
            raise RequestError(
                f"request id {twice[0]!r} occurs {names[twice[0]]} times: ids must differ"
            )
        if self._generating:
            raise RuntimeError("this engine is generating: finish or close that iterator first")
        self._generating = True
        try:
            now = self._workers.begin()
            logger.info("%d requests came", len(requests))
            self._enqueue([QueuedRequest(request=one, submitted=now) for one in requests])
            for update in self._updates():
                if self._spans is not None:
                    self._spans.saw(update, self._clock.now())
                yield update
        finally:
            self._give_up()
            self._generating = False

    def _updates(self) -> Iterator[Update]:
        """Serve the requests that wait or run, until there are none."""
        while True:
            yield from self._look_after_workers()
            self._admit()
            while self._pending:
                yield self._pending.popleft()
            if not (self._waiting or self.running):
                break
            yield from self._receive()

    def abort(self, request_id: str) -> bool:
        """End a request; the next update has its last record, with the reason `ABORT`.

        Returns False, and does nothing, where the request has ended or is not known.
        """
        for session in self.sessions:
            if request_id in session.request_ids:
                records = session.abort(request_id)
                if records:
                    session.leave(request_id)
                    self._pending.append(Update(None, None, records, session.process_rank))
                return bool(records)
        if (queued := self._waiting.take(request_id)) is not None:
            self._pending.append(Update(None, None, ended(queued, FinishReason.ABORT)))
        return queued is not None

    def preempt(self, request_id: str, *, reschedule: bool = True) -> bool:
        """Take a running request's slot away, as a scheduler does that needs the room.

        The worker answers with a record that has `reschedule` set. The request then waits at the
        head of the queue and continues after its last token. With `reschedule=False` it ends with
        the reason `RECOVERY_ERROR` instead.

        Returns False, and does nothing, where the request holds no slot.
        """
        for session in self._workers.alive():
            if request_id in session.request_ids:
                session.evict(request_id, reschedule=reschedule)
                return True
        return False

    def _enqueue(self, requests: Sequence[QueuedRequest], *, first: bool = False) -> None:
        """Queue requests in their order, behind those that wait already or before them."""
        prefill = self._workers.coming(prefill_only=True)
        self._waiting.enqueue(requests, prefill=prefill, first=first)
        if self._spans is not None and requests:
            now = self._clock.now()
            for queued in requests:
                self._spans.queued(queued, now)

    def _admit(self) -> None:
        """Give free slots to the requests that wait."""
        for session, queued in self._waiting.places(self.sessions):
            self._give_slot(session, queued)

    def _give_slot(self, session: WorkerSession, queued: QueuedRequest) -> None:
        """Admit a request, which may have had another slot before."""
        if queued.submitted is not None and not queued.had_slot:
            self.timings.queue.take(self._clock.now() - queued.submitted)
        session.admit(queued)
        if self._spans is not None:
            self._spans.placed(queued, session.process_rank, self._clock.now())
        logger.debug("request %r: process rank %d", queued.request.id, session.process_rank)

    def _look_after_workers(self) -> Iterator[Update]:
        """Hear the workers; report those that are lost."""
        for session in self._workers.look():
            yield from self._lose(session)

    def _receive(self) -> Iterator[Update]:
        """The next message of each ring that has one; waits for the first."""
        alive = self._workers.alive()
        if not self._workers.coming(prefill_only=False) and not self._workers.ending:
            yield from self._stop()
        for session in self._workers.wait(alive):
            waits = len(alive) == 1 and bool(session.request_ids)
            update = self._take(session, WAIT_SECONDS if waits else 0)
            if update is not None:
                yield update

    def _take(self, session: WorkerSession, timeout: float) -> Update | None:
        """A worker's next message as the user shall see it; None too if the worker is lost now."""
        try:
            update = session.receive(timeout)
        except (RingError, MessageError, ProcessorError) as error:
            self._workers.end(session, error)
            return None
        if update is None:
            return None
        session.measure(update, self._clock.now(), self.timings)
        return replace(update, records=self._act_on(session, update.records))

    def _act_on(self, session: WorkerSession, records: Records) -> Records:
        """Free the slots of requests that leave them; queue those that continue elsewhere.

        Returns the records as the user shall see them.
        """
        handovers = False
        for record in records.events():
            queued = session.leave(record.request_id)
            ends = record.finish_reason.name if record.finish_reason else "reschedule"
            logger.debug("request %r: %s", record.request_id, ends)
            if record.reschedule:
                self._enqueue([queued], first=True)
            elif record.finish_reason is FinishReason.PREFILL_HANDOVER:
                handovers = True
                drafts = record.handover_draft_ids
                ids = () if drafts is None else tuple(drafts.tolist())
                self._enqueue([replace(queued, draft_token_ids=ids)])
        return handed_on(records) if handovers else records

    def _lose(self, session: WorkerSession) -> Iterator[Update]:
        """Report a lost worker; queue its requests again or end them, as `EngineConfig` says."""
        config = self.config
        failure = self._workers.lose(session)
        goes_on = config.on_worker_loss != "stop" and self._workers.coming(prefill_only=False)
        records = self._act_on(session, session.flush())
        ends: list[Records] = []
        left: list[QueuedRequest] = []
        for name in session.request_ids if goes_on else ():
            # What the worker never took is told to another one, whatever the configuration says.
            if config.resume_lost or not session.took(name):
                queued = session.leave(name)
                queued = replace(queued, attempts=queued.attempts + 1)
                if queued.attempts < config.max_attempts:
                    left.append(queued)
                else:
                    ends.append(ended(queued, FinishReason.ATTEMPTS_EXHAUSTED))
                    logger.warning(
                        "request %r ends: %d workers were lost while they had it",
                        name,
                        queued.attempts,
                    )
        ends.append(self._end_all(session))
        records = Records(sum((each.batches for each in ends), records.batches))
        self._enqueue(left, first=True)
        if not self._workers.coming(prefill_only=True):
            self._waiting.prefill_no_more()
        yield Update(None, None, records, session.process_rank, lost=failure)
        if not goes_on:
            yield from self._stop()

    def _stop(self) -> Iterator[Update]:
        """Close every request, then raise a report of every worker that is lost."""
        for session in self._workers.fallen():
            while session.alive and (update := self._take(session, 0)) is not None:
                yield update
            failure = self._workers.lose(session)
            yield Update(None, None, self._end_all(session), session.process_rank, lost=failure)
        self._workers.restart_none()
        for session in self.sessions:
            if session.request_ids:
                yield Update(None, None, self._end_all(session), session.process_rank)
        for queued in self._waiting.drain():
            yield Update(None, None, ended(queued, FinishReason.WORKER_LOST))
        raise together([one.lost for one in self.sessions if one.lost is not None])

    def _end_all(self, session: WorkerSession) -> Records:
        return self._act_on(session, session.flush(FinishReason.WORKER_LOST))

    def _give_up(self) -> None:
        """Forget every request that is left, so that the next `generate` finds free slots."""
        for session in self.sessions:
            for name in session.request_ids:
                session.abort(name)  # or its record that waits for drafts would come later
                session.leave(name)
        self._waiting = Placement()
        self._pending.clear()
        if self._spans is not None:
            self._spans.give_up(self._clock.now())
