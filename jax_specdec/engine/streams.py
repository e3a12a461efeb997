"""The open streams of an engine, and the thread that serves them.

Any thread submits and ends requests: what it asks for waits in an inbox, and the engine's thread,
which alone touches workers and rings, takes it out between two rounds.
"""

import collections
import contextlib
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from jax_specdec.engine.clock import Clock
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.errors import EngineClosed, EngineFull, WorkerFailed
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.scheduler import Scheduler
from jax_specdec.engine.stream import Stream
from jax_specdec.engine.updates import Update
from jax_specdec.engine.wakeup import Wakeup
from jax_specdec.engine.weights import WeightsError, WeightsUpdate
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.processor_state import Progress
from jax_specdec.requests import Request, RequestError
from jax_specdec.wording import counted

logger = logging.getLogger("jax_specdec.engine")


class Sink(Protocol):
    """Takes what an engine brings, whole steps at a time; called by the engine's thread alone.

    While `take` waits, the engine waits too, and with it its workers, once their rings are full.
    """

    def take(self, update: Update) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Note that no further update comes."""


class Streams:
    """Streams by request id; `round` serves them once, `start` a thread that does so until `close`.

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
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._open: dict[str, Stream] = {}
        # Requests that have not begun, and why each shall end once it has; None: it shall go on.
        self._coming: dict[str, FinishReason | None] = {}
        self._inbox: collections.deque[Callable[[], object]] = collections.deque()
        self._staged = threading.local()  # what a thread submits together
        self._unread = 0  # submitted requests among what is in the inbox
        self._deadlines: list[tuple[float, int, Stream]] = []  # a heap
        self._numbers = itertools.count()
        self._lost: list[Stream] = []  # their last record says that a worker was lost
        self._refusal = ""
        self._failure: BaseException | None = None
        self._update: WeightsUpdate | None = None  # the last one
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def open_ids(self) -> tuple[str, ...]:
        """Ids of the requests whose last record has not been delivered."""
        return tuple(self._open)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended all streams, if one did."""
        return self._failure

    def start(self) -> None:
        """Serve from now on in a thread of its own; calling it again does nothing."""
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._serve, name="engine of jax_specdec", daemon=True
                )
                self._thread.start()

    def submit(
        self,
        request: Request,
        *,
        priority: int = 0,
        deadline: float | None = None,
        context: Any = None,
        progress: Progress | None = None,
    ) -> Stream:
        """Queue a request; see `Engine.submit`.

        Args:
          context: of OpenTelemetry, for the request's spans.
          progress: what was delivered of the request before.
        """
        check(request, self._config)
        now = self._clock.now()
        stream = Stream(request, self._ask_end, max_backlog=self._config.max_backlog)
        queued = QueuedRequest(
            request=request,
            progress=progress or Progress(),
            submitted=None if progress else now,
            priority=priority,
        )
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._refusal:
                raise EngineClosed(self._refusal)
            if request.id in self._open:
                raise RequestError(f"request id {request.id!r} is that of an open request")
            waiting, limit = self._unread + self._scheduler.num_waiting, self._config.max_waiting
            if waiting >= limit:
                raise EngineFull(
                    f"{counted(waiting, 'request')} wait for a slot, as many as may "
                    "(EngineConfig.max_waiting): try again later"
                )
            self._open[request.id] = stream
            self._coming[request.id] = None
            self._unread += 1
            staged: list[Callable[[], object]] | None = getattr(self._staged, "list", None)
            inbox = self._inbox if staged is None else staged
            if deadline is not None:
                entry = (now + deadline, next(self._numbers), stream)
                inbox.append(lambda: heapq.heappush(self._deadlines, entry))
            inbox.append(lambda: self._begin(queued, context))
        if staged is None:
            self.wakeup.set()
        return stream

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
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise EngineClosed(self._refusal)
            self._update = update
            self._inbox.append(lambda: self._scheduler.update_weights(update))
        self.wakeup.set()

    def discard_weights(self, why: str) -> None:
        """End the update of the weights that is on its way, and wait until that is done."""
        update = self._update
        if update is not None:
            self._ask(lambda: self._scheduler.fail_weights(why))
            with contextlib.suppress(WeightsError):
                update.result()

    def abort(self, request_id: str) -> bool:
        """End an open request; whether there is one."""
        stream = self._open.get(request_id)
        if stream is not None:
            stream.abort()
        return stream is not None

    def preempt(self, request_id: str, *, reschedule: bool) -> bool:
        """Take an open request's slot away, if it holds one by then; whether it does now."""
        if request_id not in self._open:
            return False
        holds = request_id in self._scheduler.running
        self._ask(lambda: self._scheduler.preempt(request_id, reschedule=reschedule))
        return holds

    def round(self) -> None:
        """Do what was asked for, then serve every stream once; may wait for a message.

        Raises:
          WorkerFailed: the engine has stopped; every stream is over.
        """
        self._look()
        try:
            for update in self._scheduler.round():
                self._deliver(update)
        except WorkerFailed as failure:
            self._fail(failure)
            raise
        self._close_lost(None)

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
        self._fail(EngineClosed("the engine was closed before the request ended"))
        self.wakeup.close()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self.round()
        except WorkerFailed as failure:
            logger.error("the engine has stopped: %s", failure.reason)
        except BaseException as error:
            logger.exception("the engine's thread ends")
            self._fail(error)

    def _look(self) -> None:
        """Do what was asked for, and end the requests whose time is over."""
        self.wakeup.clear()
        while self._inbox:
            self._inbox.popleft()()
        if len(self._deadlines) > 2 * len(self._open) + 64:  # most of them have ended
            self._deadlines = [one for one in self._deadlines if one[2].finish_reason is None]
            heapq.heapify(self._deadlines)
        while self._deadlines and (
            self._deadlines[0][2].finish_reason is not None
            or self._deadlines[0][0] <= self._clock.now()
        ):
            self._end(heapq.heappop(self._deadlines)[2], FinishReason.DEADLINE)

    def _begin(self, queued: QueuedRequest, context: Any) -> None:
        with self._lock:  # between the two, a request would count twice among those that wait
            self._scheduler.begin([queued], context)
            self._unread -= 1
            ends = self._coming.pop(queued.request.id)
        if ends is not None:
            self._scheduler.abort(queued.request.id, ends)

    def _ask(self, what: Callable[[], object]) -> None:
        """Have the engine's thread call a function before its next round."""
        self._inbox.append(what)
        self.wakeup.set()

    def _ask_end(self, stream: Stream, reason: FinishReason) -> None:
        self._ask(lambda: self._end(stream, reason))

    def _end(self, stream: Stream, reason: FinishReason) -> None:
        """End the stream's request; another one may have its id by now, and is spared."""
        name = stream.request.id
        if self._open.get(name) is not stream or stream.finish_reason is not None:
            return
        if name in self._coming:  # its thread still submits others together with it
            self._coming[name] = self._coming[name] or reason
        else:
            self._scheduler.abort(name, reason)

    def _deliver(self, update: Update) -> None:
        if self._sink is not None:
            self._sink.take(update)
            for record in update.records.events():
                stream = self._open.get(record.request_id)
                if stream is not None and record.finish_reason is not None:
                    stream.finish_reason = record.finish_reason
                    self._forget(record.request_id)
                    stream.close()
            return
        for record in update.records:
            name = record.request_id
            stream = self._open.get(name)
            if stream is None:
                continue
            # One that is behind stays open until its last record: another of its id would get it.
            if not stream.put(record) and record.finish_reason is None:
                logger.warning("request %r ends: nobody reads its records", name)
                self._scheduler.abort(name, FinishReason.ABORT)
            if record.finish_reason is not None:
                self._forget(name)
                if record.finish_reason is FinishReason.WORKER_LOST:
                    self._lost.append(stream)  # it may be all workers: then it ends with an error
                else:
                    stream.close()

    def _close_lost(self, error: BaseException | None) -> None:
        for stream in self._lost:
            stream.close(error)
        self._lost.clear()

    def _forget(self, name: str) -> None:
        with self._ended:
            del self._open[name]
            if not self._open:
                self._ended.notify_all()

    def _fail(self, error: BaseException) -> None:
        """End every stream by an error, and refuse further ones with it."""
        self._close_lost(error)
        with self._ended:
            self._failure = self._failure or error
            left = list(self._open.values())
            self._open.clear()
            self._ended.notify_all()
            update, self._update = self._update, None
        if update is not None:
            update.fail(f"the engine ended before all workers had loaded the weights: {error}")
        if self._sink is not None:
            self._sink.fail(error)
        for stream in left:
            stream.close(error)
