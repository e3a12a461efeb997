"""The engine: a process without jax that feeds model workers and delivers their records.

It admits requests into its workers' slots, reads all their rings in turn, queues preempted requests
again, hands prefilled requests over to decode workers, and decides what becomes of the requests of
a lost worker. Commands go to a worker as lines on its standard input; everything else comes back
through shared memory. An engine runs in one thread and serves one `generate` at a time.
"""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, Self

from ipc import RingError, wait_readable
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.queued_request import QueuedRequest, ended, handed_on
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.engine.worker_client import WorkerFailed, WorkerProcess
from jax_specdec.engine.worker_session import (
    Update,
    WorkerHandle,
    WorkerSession,
    WorkerStatus,
)
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import MessageError
from jax_specdec.records.output_processor import ProcessorError
from jax_specdec.records.record import Records
from jax_specdec.requests import Request, RequestError

HEARTBEAT_SECONDS = 0.25  # between two looks at workers that are silent


class WorkerSilent(RuntimeError):
    """A worker that has requests sent no message for too long."""


class StartWorker(Protocol):
    """Starts a worker: `WorkerProcess`, or a test's own."""

    def __call__(
        self, config: EngineConfig, *, process_rank: int, prefill_only: bool, doorbell: bool
    ) -> WorkerHandle: ...


class Engine:
    """Runs requests on its workers; use it as a context manager."""

    def __init__(self, config: EngineConfig, *, start_worker: StartWorker = WorkerProcess) -> None:
        """Start all workers: decode ranks are numbered from 0, prefill ranks come after them."""
        self.config = config
        self.sessions: list[WorkerSession] = []  # by process rank
        self._start_worker = start_worker
        # Requests without a slot, in the order in which they will get one.
        self._to_prefill = WaitingQueue()
        self._to_decode = WaitingQueue()
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
            for session in self.sessions:
                stack.callback(session.worker.stop, drain=drain and session.lost is None)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot, worker by worker."""
        return tuple(name for session in self.sessions for name in session.request_ids)

    @property
    def status(self) -> tuple[WorkerStatus, ...]:
        """Every worker's numbers, its ring's included; also after `close`."""
        return tuple(session.status for session in self.sessions)

    def generate(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run `requests`, as many at once as there are slots; yields what each message brought.

        `abort` and `preempt` may be called between two updates. A caller that stops iterating early
        gives up the requests that are left; the engine can then run others.

        Raises:
          RequestError: one of the requests cannot be served; then no request was started.
          WorkerFailed: a worker ended early or sent an invalid message, and `on_worker_loss` stops
            the engine or no decode worker is left. The updates before it closed every request that
            had begun.
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
            self._enqueue([QueuedRequest(request=request) for request in requests])
            while True:
                self._admit()
                while self._pending:
                    yield self._pending.popleft()
                if not (self._to_prefill or self._to_decode or self.running):
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
        for queue in (self._to_prefill, self._to_decode):
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
        )

    def _alive(self, *, prefill_only: bool | None = None) -> list[WorkerSession]:
        """Sessions whose worker is not lost; of decode or prefill workers only, where asked."""
        return [
            session
            for session in self.sessions
            if session.lost is None and prefill_only in (None, session.prefill_only)
        ]

    def _enqueue(self, requests: Sequence[QueuedRequest], *, first: bool = False) -> None:
        """Queue requests in their order, behind those that wait already or before them."""
        for queued in reversed(requests) if first else requests:
            # A request that has begun needs no prefill worker: a decode worker recomputes its
            # prompt anyway.
            fresh = not queued.begun and self._alive(prefill_only=True)
            queue = self._to_prefill if fresh else self._to_decode
            (queue.appendleft if first else queue.append)(queued)

    def _admit(self) -> None:
        """Give free slots to the requests that wait, always at the worker with most of them."""
        for queue, prefill_only in ((self._to_prefill, True), (self._to_decode, False)):
            sessions = self._alive(prefill_only=prefill_only)
            while queue and sessions:
                session = max(sessions, key=lambda session: session.num_free)
                if not session.num_free:
                    break
                session.admit(queue.popleft())

    def _receive(self) -> Iterator[Update]:
        """The next message of each ring that has one; waits for the first."""
        alive = self._alive()
        if not [session for session in alive if not session.prefill_only]:
            yield from self._stop(next(one.lost for one in self.sessions if one.lost))
        for session in _wait(alive):
            try:
                update = session.receive(HEARTBEAT_SECONDS if len(alive) == 1 else 0)
            except (RingError, MessageError, ProcessorError) as error:
                yield from self._lose(session, error)
                continue
            if update is not None:
                yield replace(update, records=self._act_on(session, update.records))
        if (limit := self.config.max_silence) is not None:
            for session in alive:
                if session.lost is None and session.silence > limit:
                    silent = WorkerSilent(f"nothing came for {limit} seconds")
                    yield from self._lose(session, silent)

    def _act_on(self, session: WorkerSession, records: Records) -> Records:
        """Free the slots of requests that leave them; queue those that continue elsewhere.

        Returns the records as the user shall see them.
        """
        handovers = False
        for record in records.events():
            queued = session.leave(record.request_id)
            if record.reschedule:
                self._enqueue([queued], first=True)
            elif record.finish_reason is FinishReason.PREFILL_HANDOVER:
                handovers = True
                drafts = record.handover_draft_ids
                ids = () if drafts is None else tuple(drafts.tolist())
                self._enqueue([replace(queued, draft_token_ids=ids)])
        return handed_on(records) if handovers else records

    def _lose(self, session: WorkerSession, cause: Exception) -> Iterator[Update]:
        """Report a lost worker; restart it and queue its requests as `EngineConfig` says."""
        config = self.config
        failure = session.lost = session.worker.failure(cause)
        failure.__cause__ = cause
        restarts = config.on_worker_loss == "restart" and session.restarts < config.max_restarts
        goes_on = config.on_worker_loss != "stop" and (
            restarts or bool(self._alive(prefill_only=False))
        )
        records = self._act_on(session, session.flush())
        if goes_on and config.resume_lost:
            left = [session.leave(name) for name in session.request_ids]
        else:
            left = []
            records = Records(records.batches + self._end_all(session).batches)
        if restarts:
            session.restart(self._start(session.process_rank))
        self._enqueue(left, first=True)
        if not self._alive(prefill_only=True):
            self._to_decode.extend(self._to_prefill)
            self._to_prefill.clear()
        yield Update(None, None, records, session.process_rank, lost=failure)
        if not goes_on:
            yield from self._stop(failure)

    def _stop(self, failure: WorkerFailed) -> Iterator[Update]:
        """Close every request that has begun, then raise `failure`."""
        for session in self._alive():
            if session.request_ids:
                yield Update(None, None, self._end_all(session), session.process_rank)
        for queued in (*self._to_decode, *self._to_prefill):
            if queued.begun:
                yield Update(None, None, ended(queued, FinishReason.WORKER_LOST))
        raise failure

    def _end_all(self, session: WorkerSession) -> Records:
        return self._act_on(session, session.flush(FinishReason.WORKER_LOST))

    def _give_up(self) -> None:
        """Forget every request that is left, so that the next `generate` finds free slots."""
        for session in self.sessions:
            for name in session.request_ids:
                session.abort(name)  # or its record that waits for drafts would come later
                session.leave(name)
        for queue in (self._to_prefill, self._to_decode, self._pending):
            queue.clear()


def _wait(sessions: Sequence[WorkerSession]) -> list[WorkerSession]:
    """Sessions that may have a message: the only one, or those whose ring became readable."""
    if len(sessions) == 1:
        return list(sessions)
    by_name = {session.worker.ring.name: session for session in sessions}
    rings = wait_readable([session.worker.ring for session in sessions], HEARTBEAT_SECONDS)
    return [by_name[ring.name] for ring in rings]
