"""The open requests of an engine, who reads them, and the thread that serves them.

Any thread submits and ends requests: what it asks for waits in an inbox, and the engine's thread,
which alone touches workers and rings, takes it out between two rounds. A request is read alone, by
its `Stream`, or with the others of one `generate`, by their `ResultQueue` of updates.
"""

import collections
import contextlib
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ipc import wait_readable
from jax_specdec.engine.clock import Clock
from jax_specdec.engine.config import EngineConfig, check_request
from jax_specdec.engine.errors import EngineClosed, EngineFull, WeightsError, WorkerFailed
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.result_queue import ResultQueue
from jax_specdec.engine.scheduler import Scheduler
from jax_specdec.engine.stream import Stream
from jax_specdec.engine.updates import Update
from jax_specdec.engine.wakeup import Wakeup
from jax_specdec.engine.weights import WeightsUpdate
from jax_specdec.engine.workers import WAIT_SECONDS
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.processor_state import Progress
from jax_specdec.records.record import Record, Records
from jax_specdec.requests import Request, RequestError
from jax_specdec.structured.checks import StructureChecks
from jax_specdec.structured.limits import GateFull
from jax_specdec.wording import pluralize

logger = logging.getLogger("jax_specdec.engine")
MAX_UPDATES_AHEAD = 8  # that a reader of `generate` has not taken; then the engine waits

Consumer = Stream | ResultQueue[Update]


class Sink(Protocol):
    """Takes what an engine brings, whole steps at a time; called by the engine's thread alone.

    While `take` waits, the engine waits too, and with it its workers, once their rings are full.
    """

    def take(self, update: Update) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Note that no further update comes."""


class Streams:
    """Readers by request id; `round` serves them once, `start` a thread that does so until `close`.

    Attributes:
      wakeup: ends the thread's wait for messages.
    """

    def __init__(
        self, scheduler: Scheduler, config: EngineConfig, clock: Clock, sink: Sink | None = None
    ) -> None:
        """Begin with none.

        Args:
          sink: gets all updates; then streams get no records, only their ends.
        """
        self.wakeup = Wakeup()
        self._sink = sink
        self._scheduler, self._config, self._clock = scheduler, config, clock
        self._structures = StructureChecks(config.texts, config.vocab_size)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._open: dict[str, Consumer] = {}
        self.readers: list[ResultQueue[Update]] = []  # of `generate`, until they leave
        self._num_streams = 0  # among the open ones
        # Requests that have not begun, and why each shall end once it has; None: it shall go on.
        self._coming: dict[str, FinishReason | None] = {}
        self._inbox: collections.deque[Callable[[], object]] = collections.deque()
        self._staged = threading.local()  # what a thread submits together
        self._unread = 0  # submitted requests among what is in the inbox
        self.deadlines: list[tuple[float, int, Stream]] = []  # a heap
        self._numbers = itertools.count()
        self._lost: list[Consumer] = []  # one a request whose last record says: a worker was lost
        self._refusal = ""
        self._failure: BaseException | None = None
        self.current_update: WeightsUpdate | None = None  # the last one
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def open_ids(self) -> tuple[str, ...]:
        """Ids of the requests whose last record has not been delivered."""
        return tuple(self._open)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended all requests, if one did."""
        return self._failure

    def check_open(self) -> None:
        """Refuse what nobody can do any more.

        Raises:
          EngineClosed, WorkerFailed: the engine has ended.
        """
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise EngineClosed(self._refusal)

    def start(self) -> None:
        """Serve from now on in a thread of its own; calling it again does nothing."""
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._serve, name="engine of jax_specdec", daemon=True
                )
                self._thread.start()

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be served; see `Engine.check`."""
        check_request(request, self._config)
        try:
            self._structures.check(request)
        except GateFull as error:
            raise EngineFull(str(error)) from error

    def close_checks(self) -> None:
        """End the process that compiles structures."""
        self._structures.close()

    def begin_checks(self) -> None:
        """Start what checks structures, where they are served; see `Engine.serve`."""
        if self._config.declared.grammars:
            self._structures.begin()

    async def check_async(self, request: Request) -> None:
        """The same in a program with an event loop; see `Engine.check_async`."""
        check_request(request, self._config)
        try:
            await self._structures.check_async(request)
        except GateFull as error:
            raise EngineFull(str(error)) from error

    def submit(
        self,
        request: Request,
        *,
        priority: int,
        deadline: float | None,
        progress: Progress | None,
        group: str = "",
    ) -> Stream:
        """Queue a request; see `Engine.submit`.

        Args:
          progress: what was delivered of the request before.
        """
        self.check(request)
        now = self._clock.now()
        stream: Stream[Record] = Stream(
            request,
            lambda update, reason: self._ask_end(request.id, update, reason),
            max_backlog=self._config.max_backlog,
        )
        queued = QueuedRequest(
            request=request,
            progress=progress or Progress(),
            submitted=None if progress else now,
            priority=priority,
            group=group,
        )
        with self._lock:
            self._check_new([request])
            waiting, limit = self._unread + self._scheduler.num_waiting, self._config.max_waiting
            if waiting >= limit:
                raise EngineFull(
                    f"{pluralize(waiting, 'request')} wait for a slot, as many as may "
                    "(EngineConfig.max_waiting): try again later"
                )
            self._expect([request], stream)
            staged: list[Callable[[], object]] | None = getattr(self._staged, "list", None)
            inbox = self._inbox if staged is None else staged
            if deadline is not None:
                entry = (now + deadline, next(self._numbers), stream)
                inbox.append(lambda: heapq.heappush(self.deadlines, entry))
            inbox.append(lambda: self._begin([queued]))
        if staged is None:
            self.wakeup.set()
        return stream

    def generate(self, requests: Sequence[Request]) -> ResultQueue[Update]:
        """Queue all of some requests; see `Engine.generate`. Call `leave` at the end."""
        for request in requests:
            self.check(request)
        names = collections.Counter(request.id for request in requests)
        if twice := [name for name, count in names.items() if count > 1]:
            raise RequestError(
                f"request id {twice[0]!r} occurs {names[twice[0]]} times: ids must differ"
            )
        updates: ResultQueue[Update] = ResultQueue(
            len(requests), MAX_UPDATES_AHEAD, made_room=self.wakeup.set
        )
        now = self._clock.now()
        queued = [QueuedRequest(request=request, submitted=now) for request in requests]
        with self._lock:
            self._check_new(requests)
            self._expect(requests, updates)
            self.readers.append(updates)
            self._inbox.append(lambda: self._begin(queued))
        logger.info("%d requests came", len(requests))
        self.wakeup.set()
        return updates

    def leave(self, updates: ResultQueue[Update]) -> None:
        """End the requests that are left of those that a reader had, and wait until they have."""
        updates.abandon()
        for name in [name for name, consumer in tuple(self._open.items()) if consumer is updates]:
            self._ask_end(name, updates, FinishReason.ABORT)
        self.start()
        with self._ended:
            if threading.current_thread() is not self._thread:  # which collects garbage too
                self._ended.wait_for(lambda: not updates.num_open)
            self.readers = [reader for reader in self.readers if reader is not updates]

    def _check_new(self, requests: Sequence[Request]) -> None:
        """Refuse requests while none may come, or whose ids are taken; the lock is held."""
        if self._failure is not None:
            raise self._failure
        if self._refusal:
            raise EngineClosed(self._refusal)
        for request in requests:
            if request.id in self._open:
                raise RequestError(f"request id {request.id!r} is that of an open request")

    def _expect(self, requests: Sequence[Request], consumer: Consumer) -> None:
        """Note whose requests are coming; the lock is held."""
        for request in requests:
            self._open[request.id] = consumer
            self._coming[request.id] = None
        self._num_streams += isinstance(consumer, Stream)
        self._unread += len(requests)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let what this thread submits in the block begin in one round, after it."""
        staged: list[Callable[[], object]] = []
        self._staged.list = staged
        try:
            yield
        finally:
            del self._staged.list
            self._inbox.extend(staged)
            self.wakeup.set()

    def update_weights(self, update: WeightsUpdate) -> None:
        """Carry out an update of the weights; its outcome is for who asks.

        Raises:
          EngineClosed, WorkerFailed: the engine has ended.
        """
        with self._lock:
            self.check_open()
            self.current_update = update
            self._inbox.append(lambda: self._scheduler.update_weights(update))
        self.wakeup.set()

    def discard_weights(self, why: str) -> None:
        """End the update of the weights that is on its way, and wait until that is done."""
        update = self.current_update
        if update is not None:
            self.ask(lambda: self._scheduler.fail_weights(why))
            with contextlib.suppress(WeightsError):
                update.result()

    def abort(self, request_id: str, reason: FinishReason) -> bool:
        """End an open request for this reason; whether there is one."""
        consumer = self._open.get(request_id)
        if consumer is not None:
            self._ask_end(request_id, consumer, reason)
        return consumer is not None

    def preempt(self, request_id: str, *, reschedule: bool) -> bool:
        """Take an open request's slot away, if it holds one by then; whether it does now."""
        if request_id not in self._open:
            return False
        holds = request_id in self._scheduler.running
        self.ask(lambda: self._scheduler.preempt(request_id, reschedule=reschedule))
        return holds

    def round(self) -> None:
        """Do what was asked for, then serve every request once; may wait for a message.

        Where those of `generate` are the only readers, and behind, waits for them instead; but not
        while an update of the weights is under way.

        Raises:
          WorkerFailed: the engine has stopped; every request is over.
        """
        self._look()
        if self._is_held_up():
            self._wake_readers()
            wait_readable([self.wakeup], WAIT_SECONDS)
            return
        try:
            for update in self._scheduler.prepare():
                self._deliver(update)
            self._wake_readers()  # once workers have their commands
            for update in self._scheduler.receive():
                self._deliver(update)
        except WorkerFailed as failure:
            self.fail(failure)
            raise
        self._close_lost(None)

    def _wake_readers(self) -> None:
        for reader in tuple(self.readers):
            reader.wake()

    def _is_held_up(self) -> bool:
        readers = tuple(self.readers)
        return (
            bool(readers)
            and not self._num_streams
            and not any(reader.has_room for reader in readers)
            and (self.current_update is None or self.current_update.over)
        )

    def drain(self, timeout: float | None) -> bool:
        """Take no more requests and wait for those that are open; see `Engine.drain`."""
        with self._ended:
            self._refusal = self._refusal or "the engine is draining: it takes no more requests"
            return self._ended.wait_for(lambda: not self._open, timeout)

    def close(self) -> None:
        """End every request and the thread."""
        with self._lock:
            self._refusal = "the engine is closed: make a new one"
            self._stopping = True
            thread = self._thread
        self.wakeup.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._failure is None:
            self._look()
            for name in self.open_ids:
                self._scheduler.abort(name, FinishReason.ABORT)
            for update in self._scheduler.pending():
                self._deliver(update)
        self.fail(EngineClosed("the engine was closed before the request ended"))
        self.wakeup.close()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self.round()
        except WorkerFailed as failure:
            logger.error("the engine has stopped: %s", failure.reason)
        except BaseException as error:
            logger.exception("the engine's thread ends")
            self.fail(error)

    def _look(self) -> None:
        """Do what was asked for, and end the requests whose time is over."""
        self.wakeup.clear()
        while self._inbox:
            self._inbox.popleft()()
        if len(self.deadlines) > 2 * len(self._open) + 64:  # most of them have ended
            self.deadlines = [
                deadline for deadline in self.deadlines if deadline[2].finish_reason is None
            ]
            heapq.heapify(self.deadlines)
        while self.deadlines and (
            self.deadlines[0][2].finish_reason is not None
            or self.deadlines[0][0] <= self._clock.now()
        ):
            late = heapq.heappop(self.deadlines)[2]
            self._end(late.request.id, late, FinishReason.DEADLINE)

    def _begin(self, queued: Sequence[QueuedRequest]) -> None:
        names = [request.request.id for request in queued]
        with self._lock:  # between the two, a request would count twice among those that wait
            self._scheduler.enqueue(queued)
            self._unread -= len(queued)
            ends = [(name, why) for name in names if (why := self._coming.pop(name)) is not None]
        for name, reason in ends:
            self._scheduler.abort(name, reason)

    def ask(self, what: Callable[[], object]) -> None:
        """Have the engine's thread call a function before its next round."""
        self._inbox.append(what)
        self.wakeup.set()

    def _ask_end(self, name: str, consumer: Consumer, reason: FinishReason) -> None:
        self.ask(lambda: self._end(name, consumer, reason))

    def _end(self, name: str, consumer: Consumer, reason: FinishReason) -> None:
        """End a consumer's request; another one may have its id by now, and is spared."""
        if self._open.get(name) is not consumer:
            return
        if name in self._coming:  # its thread still submits others together with it
            self._coming[name] = self._coming[name] or reason
        else:
            self._scheduler.abort(name, reason)

    def _deliver(self, update: Update) -> None:
        if self._sink is not None:
            self._sink.take(update)
        readers = [reader for reader in tuple(self.readers) if reader.num_open]
        for reader in readers:
            if len(readers) == 1 and not self._num_streams:
                reader.put(update)
            elif (records := self._records_of(reader, update.records)).batches or update.lost:
                reader.put(replace(update, records=records))
        records = update.records
        events = records if self._num_streams and self._sink is None else records.events()
        for record in events:
            name, reason = record.request_id, record.finish_reason
            consumer = self._open.get(name)
            if consumer is None:
                continue
            if isinstance(consumer, Stream):
                self._put(consumer, record)
            if reason is not None:
                with self._ended:
                    self._num_streams -= isinstance(consumer, Stream)
                    del self._open[name]
                    if reason is FinishReason.WORKER_LOST:
                        self._lost.append(consumer)  # it may be all workers: an error then
                    else:
                        consumer.finish()
                    self._ended.notify_all()

    def _put(self, stream: Stream, record: Record) -> None:
        if self._sink is not None:
            stream.finish_reason = record.finish_reason
        # One that is behind stays open until its last record: another of its id would get it.
        elif not stream.put(record) and record.finish_reason is None:
            logger.warning("request %r ends: nobody reads its records", record.request_id)
            self._scheduler.abort(record.request_id, FinishReason.ABORT)

    def _records_of(self, reader: ResultQueue[Update], records: Records) -> Records:
        """The records of a reader's requests."""
        batches = []
        for batch in records.batches:
            owners = [batch.requests[slot] for slot in batch.slots]
            is_readers = [
                owner is not None and self._open.get(owner.id) is reader for owner in owners
            ]
            if any(is_readers):
                batches.append(batch.take(np.flatnonzero(is_readers)))
        return Records(tuple(batches))

    def _close_lost(self, error: BaseException | None) -> None:
        if self._lost:
            with self._ended:
                for consumer in self._lost:
                    consumer.finish(error)
                self._lost.clear()
                self._ended.notify_all()

    def fail(self, error: BaseException) -> None:
        """End every request by an error, and refuse further ones with it."""
        self._close_lost(error)
        with self._ended:
            self._failure = self._failure or error
            open_streams = list(self._open.values())
            self._open.clear()
            self._num_streams = 0
            update, self.current_update = self.current_update, None
        if update is not None:
            update.fail(f"the engine ended before all workers had loaded the weights: {error}")
        if self._sink is not None:
            self._sink.fail(error)
        for consumer in open_streams:
            consumer.finish(error)
        with self._ended:
            self._ended.notify_all()
