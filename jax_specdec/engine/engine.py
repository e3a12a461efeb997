"""The engine: a process without jax that feeds model workers and delivers their records.

It admits requests into its workers' slots, reads all their rings in turn, puts back what was
preempted, hands over what was prefilled, and says what becomes of a lost worker's requests.
Commands go to a worker as lines on its standard input; everything else comes back through shared
memory. One thread, one `generate` at a time.
"""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, Self

from ipc import RingError, wait_readable
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.queued_request import QueuedRequest, ended, handed_on
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

HEARTBEAT_SECONDS = 0.25  # between two looks at workers that send nothing


class WorkerSilent(RuntimeError):
    """A worker had requests and sent nothing for too long."""


class StartWorker(Protocol):
    """Starts a worker; `WorkerProcess`, or something else in a test."""

    def __call__(
        self, config: EngineConfig, *, process_rank: int, prefill_only: bool, doorbell: bool
    ) -> WorkerHandle: ...


class Engine:
    """Runs requests on its workers; use it as a context manager."""

    def __init__(self, config: EngineConfig, *, start_worker: StartWorker = WorkerProcess) -> None:
        """Start all workers: decode ranks are numbered from 0, prefill ranks come after them."""
        self.config = config
        self.ranks: list[WorkerSession] = []
        self._start_worker = start_worker
        # Requests that hold no slot, in the order in which they get one.
        self._to_prefill: collections.deque[QueuedRequest] = collections.deque()
        self._to_decode: collections.deque[QueuedRequest] = collections.deque()
        self._pending: collections.deque[Update] = collections.deque()  # not yielded yet
        self._generating = False
        try:
            for process_rank in range(config.num_ranks + config.num_prefill_ranks):
                worker = self._start(process_rank)
                with contextlib.ExitStack() as stack:  # without a rank, nobody else would stop it
                    stack.callback(worker.stop, drain=False)
                    rank = WorkerSession(
                        worker,
                        num_slots=config.num_slots,
                        max_length=config.max_length,
                        process_rank=process_rank,
                        prefill_only=process_rank >= config.num_ranks,
                        rehearse=config.rehearse,
                    )
                    self.ranks.append(rank)
                    stack.pop_all()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def close(self, *, drain: bool = False) -> None:
        """Stop every worker; nothing stays in shared memory."""
        with contextlib.ExitStack() as stack:  # all of them, whatever happens at one
            for rank in self.ranks:
                stack.callback(rank.worker.stop, drain=drain and rank.lost is None)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot, rank by rank."""
        return tuple(name for rank in self.ranks for name in rank.request_ids)

    @property
    def status(self) -> tuple[WorkerStatus, ...]:
        """Every rank's numbers, those of its ring among them; also after `close`."""
        return tuple(rank.status for rank in self.ranks)

    def generate(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run `requests`, as many at once as there are slots; yields what each message brought.

        Between two updates, `abort` and `preempt` may be called. Who stops iterating early gives
        up the requests that are left; the engine can go on with others.

        Raises:
          RequestError: one of them cannot be served; none was started then.
          WorkerFailed: a worker ended early, or sent what cannot be, and `on_worker_loss` does not
            let the others go on, or there are none; the records that close every request that had
            begun came before.
        """
        for request in requests:
            check(request, self.config)
        names = collections.Counter(request.id for request in requests)
        if twice := [name for name, count in names.items() if count > 1]:
            raise RequestError(f"request ids must differ: {twice[0]!r} occurs twice")
        if self._generating:
            raise RuntimeError("this engine is generating: finish or close that iterator first")
        self._generating = True
        try:
            self._queue([QueuedRequest(request=request) for request in requests])
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
        """End a request; a record with the reason `ABORT` comes with the next update.

        Returns False, and does nothing, where it has ended or is not known.
        """
        for rank in self._alive():
            if request_id in rank.request_ids:
                records = rank.abort(request_id)
                if records:
                    rank.leave(request_id)
                    self._pending.append(Update(None, None, records, rank.process_rank))
                return bool(records)
        for queue in (self._to_prefill, self._to_decode):
            for job in queue:
                if job.request.id == request_id:
                    queue.remove(job)
                    self._pending.append(Update(None, None, ended(job, FinishReason.ABORT)))
                    return True
        return False

    def preempt(self, request_id: str, *, reschedule: bool = True) -> bool:
        """Take a running request's slot away, as a scheduler that needs the room does.

        The worker's answer is a record with `reschedule`; then the request waits at the head of
        the queue, and goes on where it was. With `reschedule` false it ends with the reason
        `RECOVERY_ERROR` instead.

        Returns False, and does nothing, where it holds no slot.
        """
        for rank in self._alive():
            if request_id in rank.request_ids:
                rank.evict(request_id, reschedule=reschedule)
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
        return [
            rank
            for rank in self.ranks
            if rank.lost is None and prefill_only in (None, rank.prefill_only)
        ]

    def _queue(self, jobs: Sequence[QueuedRequest], *, first: bool = False) -> None:
        """Let jobs wait for a slot: in their order, behind or before those that wait already."""
        for job in reversed(jobs) if first else jobs:
            # Whoever has begun needs no prefill worker: a decode worker recomputes the prompt.
            fresh = not job.begun and self._alive(prefill_only=True)
            queue = self._to_prefill if fresh else self._to_decode
            (queue.appendleft if first else queue.append)(job)

    def _admit(self) -> None:
        """Give free slots to those who wait, always on the rank with most of them."""
        for queue, prefill_only in ((self._to_prefill, True), (self._to_decode, False)):
            ranks = self._alive(prefill_only=prefill_only)
            while queue and ranks:
                rank = max(ranks, key=lambda rank: rank.num_free)
                if not rank.num_free:
                    break
                rank.admit(queue.popleft())

    def _receive(self) -> Iterator[Update]:
        """The next message of each ring that has one; waits until one has."""
        alive = self._alive()
        if not [rank for rank in alive if not rank.prefill_only]:
            yield from self._stop(next(rank.lost for rank in self.ranks if rank.lost))
        for rank in _wait(alive):
            try:
                update = rank.receive(HEARTBEAT_SECONDS if len(alive) == 1 else 0)
            except (RingError, MessageError, ProcessorError) as error:
                yield from self._lose(rank, error)
                continue
            if update is not None:
                yield replace(update, records=self._act_on(rank, update.records))
        if (limit := self.config.max_silence) is not None:
            for rank in alive:
                if rank.lost is None and rank.silence > limit:
                    yield from self._lose(rank, WorkerSilent(f"nothing came for {limit} seconds"))

    def _act_on(self, rank: WorkerSession, records: Records) -> Records:
        """Free the slots of requests that leave them; queue those that go on elsewhere.

        Returns the records as the user shall see them.
        """
        handovers = False
        for record in records.events():
            job = rank.leave(record.request_id)
            if record.reschedule:
                self._queue([job], first=True)
            elif record.finish_reason is FinishReason.PREFILL_HANDOVER:
                handovers = True
                drafts = record.handover_draft_ids
                ids = () if drafts is None else tuple(drafts.tolist())
                self._queue([replace(job, draft_token_ids=ids)])
        return handed_on(records) if handovers else records

    def _lose(self, rank: WorkerSession, cause: Exception) -> Iterator[Update]:
        """Report a lost worker, and do with its rank and its requests as told."""
        config = self.config
        failure = rank.lost = rank.worker.failure(cause)
        failure.__cause__ = cause
        restarts = config.on_worker_loss == "restart" and rank.restarts < config.max_restarts
        goes_on = config.on_worker_loss != "stop" and (
            restarts or bool(self._alive(prefill_only=False))
        )
        records = self._act_on(rank, rank.flush())
        if goes_on and config.resume_lost:
            left = [rank.leave(name) for name in rank.request_ids]
        else:
            left = []
            records = Records(records.batches + self._end_all(rank).batches)
        if restarts:
            rank.restart(self._start(rank.process_rank))
        self._queue(left, first=True)
        if not self._alive(prefill_only=True):
            self._to_decode.extend(self._to_prefill)
            self._to_prefill.clear()
        yield Update(None, None, records, rank.process_rank, lost=failure)
        if not goes_on:
            yield from self._stop(failure)

    def _stop(self, failure: WorkerFailed) -> Iterator[Update]:
        """Close every request that has begun, then raise."""
        for rank in self._alive():
            if rank.request_ids:
                yield Update(None, None, self._end_all(rank), rank.process_rank)
        for job in (*self._to_decode, *self._to_prefill):
            if job.begun:
                yield Update(None, None, ended(job, FinishReason.WORKER_LOST))
        raise failure

    def _end_all(self, rank: WorkerSession) -> Records:
        return self._act_on(rank, rank.flush(FinishReason.WORKER_LOST))

    def _give_up(self) -> None:
        for rank in self.ranks:
            for name in rank.request_ids:
                rank.abort(name)  # so that none of its records waits: nobody wants them
                rank.leave(name)
        for queue in (self._to_prefill, self._to_decode, self._pending):
            queue.clear()


def _wait(ranks: Sequence[WorkerSession]) -> list[WorkerSession]:
    """Those that may have a message: the one there is, or as soon as one of several has."""
    if len(ranks) == 1:
        return list(ranks)
    by_name = {rank.worker.ring.name: rank for rank in ranks}
    rings = wait_readable([rank.worker.ring for rank in ranks], HEARTBEAT_SECONDS)
    return [by_name[ring.name] for ring in rings]
