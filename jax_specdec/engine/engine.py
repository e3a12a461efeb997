"""The engine: a process without jax that feeds model workers and delivers their records.

It admits requests into its workers' slots, reads all their rings in turn, queues preempted requests
again, hands prefilled requests over to decode workers, and decides what becomes of the requests of
a lost worker. Commands and heartbeats travel over the control plane, records through shared memory.
An engine runs in one thread, which never waits for a worker, and serves one `generate` at a time.
"""

import collections
import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from ipc import RingError, RingReader, wait_readable
from jax_specdec.control import ControlServer
from jax_specdec.engine.clock import Clock, MonotonicClock
from jax_specdec.engine.config import MAX_RESTART_DELAY, EngineConfig, check
from jax_specdec.engine.devices import Share, shares
from jax_specdec.engine.queued_request import QueuedRequest, ended, handed_on
from jax_specdec.engine.timings import Timings
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.engine.worker_client import WorkerFailed, WorkerProcess
from jax_specdec.engine.worker_session import (
    Update,
    WorkerHandle,
    WorkerSession,
    WorkerStatus,
)
from jax_specdec.engine.workplace import Workplace
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import MessageError
from jax_specdec.records.output_processor import ProcessorError
from jax_specdec.records.record import Records
from jax_specdec.requests import Request, RequestError

LOOK_SECONDS = 0.1  # between two looks at the control plane while messages come
WAIT_SECONDS = 0.25  # of one wait for a message
BRIEF_SECONDS = 0.02  # of one wait while only rings without a doorbell, or ends, can be waited for

logger = logging.getLogger("jax_specdec.engine")
logger.addHandler(logging.NullHandler())  # a program that sets up no logging sees none


@dataclass(frozen=True)
class Health:
    """An engine's state at one moment, for a supervisor.

    Attributes:
      alive: it can serve requests, now or once workers have started; if not, start it anew.
      ready: a decode worker takes requests now.
      problems: what is wrong, in sentences; an engine may be alive and ready with some.
    """

    alive: bool
    ready: bool
    problems: tuple[str, ...]


class StartWorker(Protocol):
    """Starts a worker: `WorkerProcess`, or a test's own."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        process_rank: int,
        prefill_only: bool,
        doorbell: bool,
        workplace: Workplace,
        share: Share,
    ) -> WorkerHandle: ...


class Engine:
    """Runs requests on its workers; use it as a context manager."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_worker: StartWorker = WorkerProcess,
        clock: Clock | None = None,
    ) -> None:
        """Start all workers: decode ranks are numbered from 0, prefill ranks come after them.

        Raises:
          ValueError: there are fewer devices than the workers need.
        """
        self.config = config
        self.sessions: list[WorkerSession] = []  # by process rank
        self._start_worker = start_worker
        self._clock = clock or MonotonicClock()
        self.timings = Timings()
        self._workplace = Workplace(config.control_address, config.output_folder)
        self._shares = shares(
            config.num_ranks + config.num_prefill_ranks,
            config.tensor_parallel,
            os.environ,
            named=config.devices,
            processes=config.processes,
        )
        self._next_look = self._looked = 0.0
        self._restarts: dict[int, float] = {}  # when to start a worker, by process rank
        # Requests without a slot, in the order in which they will get one.
        self._to_prefill = WaitingQueue()
        self._to_decode = WaitingQueue()
        # Those that were lost with a worker: each gets a worker for itself, one after the other.
        self._to_try_alone = WaitingQueue()
        self._set_apart: WorkerSession | None = None  # the worker that they get
        self._pending: collections.deque[Update] = collections.deque()  # not yielded yet
        self._generating = False
        try:
            for process_rank in range(config.num_ranks + config.num_prefill_ranks):
                worker = self._start(process_rank)
                with contextlib.ExitStack() as stack:  # `close` stops only workers with a session
                    stack.callback(worker.stop, drain=False)
                    session = WorkerSession(
                        worker,
                        num_slots=config.num_slots,
                        max_length=config.max_length,
                        process_rank=process_rank,
                        prefill_only=process_rank >= config.num_ranks,
                        rehearse=config.rehearse,
                        num_drafts=config.num_drafts,
                    )
                    self.sessions.append(session)
                    stack.pop_all()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def close(self, *, drain: bool = False) -> None:
        """Stop every worker and free the shared memory.

        Args:
          drain: let the workers publish what they have computed; otherwise they end at once.
        """
        with contextlib.ExitStack() as stack:  # an error at one worker must not spare the others
            stack.callback(self._workplace.close)
            for session in self.sessions:
                stack.callback(session.worker.stop, drain=drain and session.alive)

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
        if self._workplace.listens:
            self._workplace.server.pump()
        problems = []
        away = self._clock.now() - self._looked
        if self._generating and away > patience:
            problems.append(f"nobody has asked generate for an update for {away:.0f} seconds")
        for session in self.sessions:
            what = f"process rank {session.process_rank}"
            if session.process_rank in self._restarts:
                problems.append(f"{what}: a new worker will be started")
            elif not session.alive:
                problems.append(f"{what}: its worker is lost ({session.ending})")
            elif session.worker.exit_status is not None:
                problems.append(f"{what}: its process has ended; the next request will report it")
        serves = self._coming(prefill_only=False)
        return Health(
            alive=serves and not (self._generating and away > patience),
            ready=any(session.ready and not session.prefill_only for session in self.sessions),
            problems=tuple(problems),
        )

    def generate(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run `requests`, as many at once as there are slots; yields what each message brought.

        `abort` and `preempt` may be called between two updates. A caller that stops iterating early
        gives up the requests that are left; the engine can then run others.

        Raises:
          RequestError: one of the requests cannot be served; then no request was started.
          WorkerFailed: a worker ended early or sent an invalid message, and `on_worker_loss` stops
            the engine or no decode worker is left. The updates before it closed every request,
            those that had not begun too.
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
        self._next_look = 0.0
        try:
            self._looked = now = self._clock.now()
            logger.info("%d requests came", len(requests))
            self._enqueue([QueuedRequest(request=one, submitted=now) for one in requests])
            while True:
                yield from self._look_after_workers()
                self._admit()
                while self._pending:
                    yield self._pending.popleft()
                if not (any(self._queues) or self.running):
                    break
                yield from self._receive()
        finally:
            self._give_up()
            self._generating = False

    def abort(self, request_id: str) -> bool:
        """End a request; the next update has its last record, with the reason `ABORT`.

        Returns False, and does nothing, where the request has ended or is not known.
        """
        for session in self._alive():
            if request_id in session.request_ids:
                records = session.abort(request_id)
                if records:
                    session.leave(request_id)
                    self._pending.append(Update(None, None, records, session.process_rank))
                return bool(records)
        for queue in self._queues:
            if (queued := queue.take(request_id)) is not None:
                self._pending.append(Update(None, None, ended(queued, FinishReason.ABORT)))
                return True
        return False

    def preempt(self, request_id: str, *, reschedule: bool = True) -> bool:
        """Take a running request's slot away, as a scheduler does that needs the room.

        The worker answers with a record that has `reschedule` set. The request then waits at the
        head of the queue and continues after its last token. With `reschedule=False` it ends with
        the reason `RECOVERY_ERROR` instead.

        Returns False, and does nothing, where the request holds no slot.
        """
        for session in self._alive():
            if request_id in session.request_ids:
                session.evict(request_id, reschedule=reschedule)
                return True
        return False

    def _start(self, process_rank: int) -> WorkerHandle:
        config = self.config
        return self._start_worker(
            config,
            process_rank=process_rank,
            prefill_only=process_rank >= config.num_ranks,
            doorbell=config.num_ranks + config.num_prefill_ranks > 1,
            workplace=self._workplace,
            share=self._shares[process_rank],
        )

    @property
    def _queues(self) -> tuple[WaitingQueue, ...]:
        return self._to_try_alone, self._to_prefill, self._to_decode

    def _alive(self, *, prefill_only: bool | None = None) -> list[WorkerSession]:
        """Sessions whose worker is not lost; of decode or prefill workers only, where asked."""
        return [
            session
            for session in self.sessions
            if session.alive and prefill_only in (None, session.prefill_only)
        ]

    def _coming(self, *, prefill_only: bool) -> bool:
        """Whether such a worker lives or will: one that ended may get a successor."""
        return any(
            session.prefill_only == prefill_only
            and (session.alive or session.process_rank in self._restarts)
            for session in self.sessions
        )

    def _enqueue(self, requests: Sequence[QueuedRequest], *, first: bool = False) -> None:
        """Queue requests in their order, behind those that wait already or before them."""
        for queued in reversed(requests) if first else requests:
            # A request that has begun needs no prefill worker: a decode worker recomputes its
            # prompt anyway.
            fresh = not queued.begun and self._coming(prefill_only=True)
            queue = self._to_prefill if fresh else self._to_decode
            if queued.alone:
                queue = self._to_try_alone
            (queue.appendleft if first else queue.append)(queued)

    def _admit(self) -> None:
        """Give free slots to the requests that wait, always at the worker with most of them.

        A worker takes requests once it has loaded its model: what waits until then waits here.
        """
        self._admit_alone()
        for queue, prefill_only in ((self._to_prefill, True), (self._to_decode, False)):
            if not queue:
                continue
            sessions = [
                session
                for session in self.sessions
                if session.prefill_only == prefill_only
                and session.ready
                and session is not self._set_apart
            ]
            while queue and sessions:
                session = max(sessions, key=lambda session: session.num_free)
                if not session.num_free:
                    break
                self._give_slot(session, queue.popleft())

    def _give_slot(self, session: WorkerSession, queued: QueuedRequest) -> None:
        """Admit a request, which may have had another slot before."""
        if queued.submitted is not None and not queued.attempts:
            self.timings.queue.take(self._clock.now() - queued.submitted)
        session.admit(queued)
        logger.debug("request %r: process rank %d", queued.request.id, session.process_rank)

    def _admit_alone(self) -> None:
        """Set one decode worker apart for requests that may end it, while there are any."""
        apart = self._set_apart
        if apart is not None and not apart.alive:
            apart = None
        if apart is None and self._to_try_alone:
            sessions = [each for each in self.sessions if each.ready and not each.prefill_only]
            apart = max(sessions, key=lambda session: session.num_free, default=None)
        if apart is not None and not apart.request_ids:
            if self._to_try_alone:
                self._give_slot(apart, self._to_try_alone.popleft())
            else:
                apart = None
        self._set_apart = apart

    def _look_after_workers(self) -> Iterator[Update]:
        """Hear the workers; report those that are lost, start those that are due."""
        now = self._clock.now()
        if now < self._next_look:
            return
        self._looked, self._next_look = now, now + LOOK_SECONDS
        if self._workplace.listens:
            self._workplace.server.pump()
        config = self.config
        for session in self._alive():
            silent = session.look(
                now, heartbeat_timeout=config.heartbeat_timeout, max_silence=config.max_silence
            )
            if silent is not None:
                self._end(session, silent)
        for session in self.sessions:
            if session.ending is not None and session.lost is None and session.worker.ended:
                yield from self._lose(session, session.ending)
        now = self._clock.now()  # one that was just lost may be due at once
        for rank in [rank for rank, due in self._restarts.items() if due <= now]:
            del self._restarts[rank]
            self.sessions[rank].restart(self._start(rank))
            logger.info("process rank %d: a new worker was started", rank)

    def _receive(self) -> Iterator[Update]:
        """The next message of each ring that has one; waits for the first."""
        alive = self._alive()
        if not self._coming(prefill_only=False) and not any(
            session.ending is not None and session.lost is None for session in self.sessions
        ):
            yield from self._stop(next(one.lost for one in self.sessions if one.lost))
        for session in self._wait(alive):
            waits = len(alive) == 1 and bool(session.request_ids)
            try:
                update = session.receive(WAIT_SECONDS if waits else 0)
            except (RingError, MessageError, ProcessorError) as error:
                self._end(session, error)
                continue
            if update is not None:
                session.measure(update, self._clock.now(), self.timings)
                yield replace(update, records=self._act_on(session, update.records))

    def _wait(self, alive: Sequence[WorkerSession]) -> Sequence[WorkerSession]:
        """Sessions that may have a message: those whose ring became readable.

        A ring that is the only one has no doorbell; `receive` waits for it, while it has requests.
        """
        if len(alive) == 1 and alive[0].request_ids:
            return alive
        control = [self._workplace.server] if self._workplace.listens else []
        if not self.running:  # workers load, or are waited for: only a heartbeat or an end can come
            self._next_look = 0.0
            if control:
                wait_readable(control, BRIEF_SECONDS)
            else:
                self._clock.sleep(BRIEF_SECONDS)
            return alive
        by_name = {session.worker.ring.name: session for session in alive}
        sources: list[RingReader | ControlServer] = [each.worker.ring for each in alive]
        found = wait_readable([*sources, *control], WAIT_SECONDS)
        if not found or found[-1] in control:
            self._next_look = 0.0
        return [by_name[ring.name] for ring in found if not isinstance(ring, ControlServer)]

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

    def _end(self, session: WorkerSession, cause: Exception) -> None:
        """Note that a worker is lost; it is reported once it has ended."""
        session.ending = cause
        session.worker.end(cause)
        self._next_look = 0.0

    def _lose(self, session: WorkerSession, cause: Exception) -> Iterator[Update]:
        """Report a lost worker; plan its successor, queue its requests, as `EngineConfig` says."""
        config = self.config
        failure = session.lost = session.worker.failure(cause)
        failure.__cause__ = cause
        had = session.request_ids
        logger.warning("a worker is lost, with the requests %s: %s", list(had), failure)
        if config.on_worker_loss == "restart" and session.restarts < config.max_restarts:
            delay = min(config.restart_delay * 2**session.restarts, MAX_RESTART_DELAY)
            self._restarts[session.process_rank] = self._clock.now() + delay
        goes_on = config.on_worker_loss != "stop" and self._coming(prefill_only=False)
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
        if not self._coming(prefill_only=True):
            self._to_decode.extend(self._to_prefill)
            self._to_prefill.clear()
        yield Update(None, None, records, session.process_rank, lost=failure)
        if not goes_on:
            yield from self._stop(failure)

    def _stop(self, failure: WorkerFailed) -> Iterator[Update]:
        """Close every request, then raise `failure`."""
        self._restarts.clear()
        for session in self.sessions:
            if session.request_ids:
                yield Update(None, None, self._end_all(session), session.process_rank)
        for queue in self._queues:
            while queue:
                records = ended(queue.popleft(), FinishReason.WORKER_LOST)
                yield Update(None, None, records)
        raise failure

    def _end_all(self, session: WorkerSession) -> Records:
        return self._act_on(session, session.flush(FinishReason.WORKER_LOST))

    def _give_up(self) -> None:
        """Forget every request that is left, so that the next `generate` finds free slots."""
        for session in self.sessions:
            for name in session.request_ids:
                session.abort(name)  # or its record that waits for drafts would come later
                session.leave(name)
        for queue in self._queues:
            queue.clear()
        self._pending.clear()
