"""Requests on workers, in rounds: admitted, read, handed over, queued again, ended.

A scheduler runs in one thread, the engine's, which never waits for a worker.
"""

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ipc import RingError
from jax_specdec.engine.clock import Clock
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.errors import together
from jax_specdec.engine.queued_request import QueuedRequest, ended, handed_on
from jax_specdec.engine.timings import Timings
from jax_specdec.engine.trials import Placement
from jax_specdec.engine.updates import Update
from jax_specdec.engine.weights import WeightsUpdate
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.engine.workers import WAIT_SECONDS, Workers
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import MessageError
from jax_specdec.records.output_processor import ProcessorError
from jax_specdec.records.record import Records

logger = logging.getLogger("jax_specdec.engine")


class Scheduler:
    """Admits requests into workers' slots, reads all rings in turn, and acts on what they say.

    Attributes:
      workers: its workers.
      timings: histograms of what it sees.
      ended_without_slot: requests that ended while they waited, by `FinishReason`.
    """

    def __init__(self, config: EngineConfig, workers: Workers, clock: Clock) -> None:
        self.workers = workers
        self.timings = Timings()
        self.ended_without_slot = [0] * len(FinishReason)
        self._config, self._clock = config, clock
        # Requests without a slot.
        self._waiting = Placement()
        self._loss_numbers = itertools.count(1)
        self.fresh_updates: deque[Update] = deque()  # not yielded yet
        self._weights: WeightsUpdate | None = None  # that is on its way

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self.running)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot, worker by worker."""
        return tuple(name for session in self.workers.sessions for name in session.request_ids)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot; any thread may ask."""
        return len(self._waiting)

    def enqueue(self, requests: Sequence[QueuedRequest], *, first: bool = False) -> None:
        """Queue requests in their order, behind those of their priority, or (`first`) before."""
        prefill = self.workers.coming(prefill_only=True)
        self._waiting.enqueue(requests, prefill=prefill, first=first)

    def prepare(self) -> Iterator[Update]:
        """The first half of a round: hear the workers and give slots away; waits for nothing.

        Raises:
          WorkerFailed: a worker is lost and no other may go on; see `Engine.generate`.
        """
        waiting = (queued.request.params for queued in self._waiting)
        for session in self.workers.look(waiting):
            yield from self._lose(session)
        if self._weights is not None:
            self._weights.look(self._clock.now())
            self._weights = None if self._weights.over else self._weights
        self.admit()
        yield from self.pending()

    def receive(self) -> Iterator[Update]:
        """The other half: a message of each ring that has one; raises as `prepare`.

        Waits for the first message; where no request waits or runs, for what wakes the engine.
        """
        alive = self.workers.alive()
        if not self.workers.coming(prefill_only=False) and not self.workers.ending:
            yield from self._stop()
        for session in self.workers.wait(alive, idle=not self.busy):
            waits = len(alive) == 1 and bool(session.request_ids)
            update = self._take(session, WAIT_SECONDS if waits else 0)
            if update is not None:
                yield update

    def update_weights(self, update: WeightsUpdate) -> None:
        """Carry out an update of the weights in the rounds from now on; one at a time."""
        self._weights = update

    def fail_weights(self, why: str) -> None:
        """End the update of the weights that is on its way, if there is one."""
        if self._weights is not None:
            self._weights.fail(why)
            self._weights = None

    def pending(self) -> Iterator[Update]:
        """Updates that aborts have caused and no round has yielded yet."""
        while self.fresh_updates:
            yield self.fresh_updates.popleft()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request that is open, with a record of the reason; see `Engine.abort`."""
        for session in self.workers.sessions:
            if request_id in session.request_ids:
                records = session.abort(request_id, reason)
                if records:
                    session.leave(request_id)
                    self.fresh_updates.append(Update(None, None, records, session.process_rank))
                return
        if (queued := self._waiting.take(request_id)) is not None:
            self.fresh_updates.append(Update(None, None, self._ended(queued, reason)))

    def preempt(self, request_id: str, *, reschedule: bool) -> None:
        """Take a running request's slot away; see `Engine.preempt`."""
        for session in self.workers.alive():
            if request_id in session.request_ids:
                session.evict(request_id, reschedule=reschedule)

    def admit(self) -> None:
        """Give free slots to the requests that wait."""
        for session, queued in self._waiting.places(self.workers.sessions, self._clock.now()):
            if queued.submitted is not None and not queued.had_slot:
                self.timings.queue.take(self._clock.now() - queued.submitted)
            session.admit(queued)
            logger.debug("request %r: process rank %d", queued.request.id, session.process_rank)

    def _take(self, session: WorkerSession, timeout: float) -> Update | None:
        """A worker's next message as the user shall see it; None too if the worker is lost now."""
        try:
            update = session.receive(timeout)
        except (RingError, MessageError, ProcessorError) as error:
            self.workers.end(session, error)
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
            if record.finish_reason is None:
                logger.debug("request %r: reschedule", record.request_id)
            elif logger.isEnabledFor(logging.DEBUG):
                self._log_end(queued, record.finish_reason)
            if record.reschedule:
                self.enqueue([queued], first=True)
            elif record.finish_reason is FinishReason.PREFILL_HANDOVER:
                handovers = True
                drafts = record.handover_draft_ids
                ids = () if drafts is None else tuple(drafts.tolist())
                self.enqueue([replace(queued, draft_token_ids=ids)])
        return handed_on(records) if handovers else records

    def _log_end(self, queued: QueuedRequest, reason: FinishReason) -> None:
        progress = queued.progress
        logger.debug(
            "request %r: %s; tokens: %d, steps: %d, drafts accepted: %d of %d",
            queued.request.id,
            reason.name,
            len(progress.token_ids),
            progress.statistics.steps,
            progress.statistics.num_accepted,
            progress.statistics.num_drafts,
        )

    def _lose(self, session: WorkerSession) -> Iterator[Update]:
        """Report a lost worker; queue its requests again or end them, as `EngineConfig` says."""
        config = self._config
        failure = self.workers.lose(session)
        records = self._act_on(session, session.flush())
        number, suspects = next(self._loss_numbers), self._waiting.suspects(session)
        exhausted = self._exhausted(session, suspects)
        self._settle(session, number, exhausted if len(suspects) == 1 else ())
        goes_on = config.on_worker_loss != "stop" and self.workers.coming(prefill_only=False)
        ends: list[Records] = []
        remaining: list[QueuedRequest] = []
        for name in session.request_ids if goes_on else ():
            # What the worker never took is told to another one, whatever the configuration says.
            if config.resume_lost or not session.took(name):
                queued = session.leave(name)
                losses = (*queued.losses, number) if name in suspects else ()
                queued = replace(queued, losses=losses)
                if name in exhausted:
                    ends.append(self._ended(queued, FinishReason.ATTEMPTS_EXHAUSTED))
                    logger.warning(
                        "request %r ends: %d workers were lost while they had it", name, len(losses)
                    )
                else:
                    remaining.append(queued)
        ends.append(self._end_all(session))
        records = Records(sum((ending.batches for ending in ends), records.batches))
        self.enqueue(remaining, first=True)
        if not self.workers.coming(prefill_only=True):
            self._waiting.prefill_no_more()
        yield Update(None, None, records, session.process_rank, lost=failure)
        if not goes_on:
            yield from self._stop()

    def _exhausted(self, session: WorkerSession, suspects: Sequence[str]) -> tuple[str, ...]:
        """Those of a lost worker's suspects that get no further worker."""
        most = self._config.max_attempts
        if most > 1 and len(suspects) > 1:  # which of them it is shall be found out first
            return ()
        again = [
            name
            for name in suspects
            if (self._config.resume_lost or not session.took(name))
            and len(session.losses(name)) + 1 >= most
        ]
        return tuple(again)

    def _settle(self, session: WorkerSession, number: int, blamed: Sequence[str]) -> None:
        """Count a loss against the worker's place, unless it is put down to a request."""
        for name in blamed:
            self.workers.forgive(session.losses(name))
        self.workers.replace(session, None if blamed else number)

    def _stop(self) -> Iterator[Update]:
        """Close every request, then raise a report of every worker that is lost."""
        for session in self.workers.fallen():
            while session.alive and (update := self._take(session, 0)) is not None:
                yield update
            failure = self.workers.lose(session)
            yield Update(None, None, self._end_all(session), session.process_rank, lost=failure)
        self.workers.restart_none()
        for session in self.workers.sessions:
            if session.request_ids:
                yield Update(None, None, self._end_all(session), session.process_rank)
        for queued in self._waiting.drain():
            yield Update(None, None, self._ended(queued, FinishReason.WORKER_LOST))
        yield from self.pending()
        raise together(
            [session.lost for session in self.workers.sessions if session.lost is not None]
        )

    def _ended(self, queued: QueuedRequest, reason: FinishReason) -> Records:
        """The last record of a request that holds no slot; counts it."""
        self.ended_without_slot[reason - 1] += 1
        return ended(queued, reason)

    def _end_all(self, session: WorkerSession) -> Records:
        return self._act_on(session, session.flush(FinishReason.WORKER_LOST))
