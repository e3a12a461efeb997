"""The engine: a process without jax that feeds model workers and delivers their records.

It admits requests into its workers' slots, reads all their rings in turn, queues preempted requests
again, hands prefilled requests over to decode workers, and decides what becomes of the requests of
a lost worker (`scheduler.py`). Commands and heartbeats travel over the control plane, records
through shared memory. One thread does all of it, and never waits for a worker; it starts with the
first request.
"""

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jax_specdec.engine.clock import Clock
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.scheduler import Scheduler
from jax_specdec.engine.stream import Stream
from jax_specdec.engine.streams import Sink, Streams
from jax_specdec.engine.timings import Timings
from jax_specdec.engine.updates import Update, WorkerStatus
from jax_specdec.engine.weights import WeightsUpdate
from jax_specdec.engine.weights_source import WeightsSource
from jax_specdec.engine.worker_client import WorkerProcess
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.engine.workers import Health, StartWorker, Workers
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.processor_state import Progress
from jax_specdec.records.record import Record
from jax_specdec.requests import Request


class Engine:
    """Runs requests on its workers; use it as a context manager."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_worker: StartWorker = WorkerProcess,
        clock: Clock | None = None,
        sink: Sink | None = None,
    ) -> None:
        """Start all workers: decode ranks are numbered from 0, prefill ranks come after them.

        Args:
          config: what to run.
          start_worker: starts a worker's process.
          clock: tells the time.
          sink: gets every update of submitted requests, in place of their streams, which then only
            tell of ends: for who passes whole steps on.

        Raises:
          ValueError: there are fewer devices than the workers need.
        """
        self.config = config
        self._clock = clock or Clock()
        self._workers = Workers(config, start_worker, self._clock)
        self._scheduler = Scheduler(config, self._workers, self._clock)
        self._streams = Streams(self._scheduler, config, self._clock, sink)
        self._workers.wakeup = self._streams.wakeup
        self._updating = threading.Lock()  # held for one update of the weights
        self._updates = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def close(self, *, drain: bool = False) -> None:
        """Stop every worker and free the shared memory; requests that are open end as aborted.

        Args:
          drain: let the workers publish what they have computed; otherwise they end at once.
        """
        self._streams.close()
        self._streams.close_checks()
        self._workers.close(drain=drain)

    @property
    def sessions(self) -> list[WorkerSession]:
        """The engine's sessions with its workers, by process rank."""
        return self._workers.sessions

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot, worker by worker."""
        return self._scheduler.running

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a slot."""
        return self._scheduler.num_waiting

    @property
    def ended_without_slot(self) -> tuple[int, ...]:
        """How many requests have ended while they waited for a slot, by `FinishReason`, from 1 on.

        Those that held one are counted in `status`.
        """
        return tuple(self._scheduler.ended_without_slot)

    @property
    def timings(self) -> Timings:
        """Histograms of waits, tokens, messages and steps."""
        return self._scheduler.timings

    @property
    def status(self) -> tuple[WorkerStatus, ...]:
        """Every worker's numbers, its ring's included; also after `close`."""
        return tuple(session.status for session in self.sessions)

    @property
    def failure(self) -> BaseException | None:
        """The error that has stopped the engine for good; None while it goes on."""
        return self._streams.failure

    def health(self, patience: float = 10.0) -> Health:
        """Whether requests can be served, for a supervisor; any thread may ask, at any time.

        Args:
          patience: seconds that the engine's thread may be away, or wait for the reader of
            `generate`.
        """
        return self._workers.health(patience=patience, failure=self.failure)

    def generate(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run `requests`, as many at once as there are slots; yields what each message brought.

        Any thread may call it, and other requests may run at the same time: an update has the
        records of these alone. `EngineConfig.max_waiting` does not bound them. The engine waits
        where this iterator is not read, unless others are. Leaving it ends the requests that are
        left.

        Raises:
          RequestError: one of the requests cannot be served; then no request was started.
          EngineClosed: the engine drains, or is closed.
          WorkerFailed: a worker ended early or sent an invalid message, and `on_worker_loss` stops
            the engine or no decode worker is left; it names every worker that is lost by then. The
            updates before it closed every request, those that had not begun too.
        """
        updates = self._streams.generate(requests)
        self._streams.start()
        try:
            yield from updates
        finally:
            self._streams.leave(updates)

    def submit(
        self,
        request: Request,
        *,
        priority: int = 0,
        deadline: float | None = None,
        progress: Progress | None = None,
        group: str = "",
    ) -> Stream:
        """Run a request with those that run already; returns its records as they come.

        Any thread may call it. The first call starts the engine's thread.

        Args:
          request: the request; its id must differ from those of the requests that are open.
          priority: a request with a lower one gets a slot before it, and those of the same in the
            order in which they came. None that runs is stopped for it.
          deadline: seconds from now, after which it ends with the reason `DEADLINE`; None: never.
          progress: what another engine delivered of it: this one goes on behind that.
          group: requests with the same one were asked for together. Slots are given to groups in
            turn, and an eighth of them (one at least, of two or more) is kept for groups that have
            none. Empty: a group of its own.

        Raises:
          RequestError: the request cannot be served, or its id is that of an open one.
          EngineFull: `EngineConfig.max_waiting` requests wait.
          EngineClosed: the engine drains, or is closed.
          WorkerFailed: the engine has stopped because of a lost worker.
        """
        stream = self._streams.submit(
            request, priority=priority, deadline=deadline, progress=progress, group=group
        )
        self._streams.start()
        return stream

    def check(self, request: Request) -> None:
        """Refuse a request that `submit` would, and that alone.

        A structure is compiled for it, once, in a process of its own with limits of CPU time and
        memory: `submit` waits for that, unless a call of this has before.

        Raises:
          RequestError: the request cannot be served.
          EngineFull: too many structures wait to be compiled.
        """
        self._streams.check(request)

    async def check_async(self, request: Request) -> None:
        """The same in a program with an event loop, which goes on meanwhile.

        Where the task is cancelled and nobody else waits for the structure, its compilation ends.
        Raises as `check_request`.
        """
        await self._streams.check_async(request)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let the requests that this thread submits in the block begin in the same steps, after it.

        Otherwise the first ones run while the others are on their way, and each step has fewer.
        """
        with self._streams.together():
            yield

    async def stream(
        self, request: Request, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncIterator[Record]:
        """Run a request, and yield its records in an asyncio program; arguments as `submit`.

        Leaving the loop early, and cancelling its task, ends the request.

        Raises:
          RequestError, EngineFull, EngineClosed, WorkerFailed: as `submit`.
          StreamBehind: the records were read too slowly.
        """
        with self.submit(request, priority=priority, deadline=deadline) as records:
            async for record in records:
                yield record

    def serve(self) -> None:
        """Hear the workers from now on, in the engine's thread; a request does so too.

        What checks structures is started as well, if they are served: the first one takes no longer
        than others.

        Raises:
          EngineClosed, WorkerFailed: the engine has ended.
        """
        self._streams.check_open()
        self._streams.begin_checks()
        self._streams.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until those that are open have ended.

        Args:
          timeout: seconds to wait at most; None: as long as it takes.

        Returns whether all have ended. `close` ends the others.
        """
        return self._streams.drain(timeout)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request; its next record is its last one, with this reason.

        Any thread may call it. Returns False, and does nothing, where the request has ended or is
        not known.
        """
        return self._streams.abort(request_id, reason)

    def preempt(self, request_id: str, *, reschedule: bool = True) -> bool:
        """Take a running request's slot away, as a scheduler does that needs the room.

        The worker answers with a record that has `reschedule` set. The request then waits at the
        head of the queue and continues after its last token. With `reschedule=False` it ends with
        the reason `RECOVERY_ERROR` instead. Any thread may call it.

        Returns False, and does nothing, where the request holds no slot.
        """
        return self._streams.preempt(request_id, reschedule=reschedule)

    @property
    def weights_version(self) -> int:
        """Of the weights that new requests run with; records say those of their own tokens."""
        return self._workers.weights_version

    def update_weights(
        self, weights: str | Path | Mapping[str, Any], *, timeout: float | None = None
    ) -> int:
        """Let all workers use other weights of the same model, or none; returns their version.

        Every worker loads and checks them beside those that it uses, while requests wait; then each
        uses them from one of its steps on, and runs the tokens of its requests again, for new
        caches. Nothing is compiled. Requests go on: their further tokens are of the new version,
        and so are all tokens of requests that come after this call. A draft model stays as it is.

        Any thread may call it.

        Args:
          weights: a path, as `EngineConfig.weights`, whose files must not be written to while they
            are read; or arrays by their names in the checkpoint that the engine was started with:
            those of its files in a directory in Hugging Face layout, and otherwise those of
            `jax_specdec.device.model.named_arrays`.
          timeout: seconds until all workers must have loaded them; None: as long as it takes.

        Raises:
          WeightsError: a worker refuses them, was lost before all had them, or needs longer; or
            nothing can be read. All workers use the weights that they had.
          EngineClosed, WorkerFailed: the engine ends or has ended.
        """
        with self._update(weights, timeout, held=False) as update:
            return update.result()

    @contextlib.contextmanager
    def load_weights(
        self, weights: str | Path | Mapping[str, Any], *, timeout: float | None = None
    ) -> Iterator[WeightsUpdate]:
        """Let all workers load other weights beside those that they use; arguments as above.

        The block begins once all have; `use` in it does the rest of `update_weights`. Without it
        they forget them at the block's end. So several engines change all, or none of them does.

        Raises:
          WeightsError, EngineClosed, WorkerFailed: as `update_weights`.
        """
        with self._update(weights, timeout, held=True) as update:
            yield update

    @contextlib.contextmanager
    def _update(
        self, weights: str | Path | Mapping[str, Any], timeout: float | None, *, held: bool
    ) -> Iterator[WeightsUpdate]:
        with self._updating:
            self._streams.check_open()
            number = next(self._updates)
            target = self._workers.directory.weights_file(number)
            source = WeightsSource.of(weights, self.config, target)
            deadline = None if timeout is None else self._clock.now() + timeout
            update = WeightsUpdate(self._workers, source, number, deadline, held=held)
            try:
                self._streams.update_weights(update)
                self._streams.start()
                update.wait_loaded()
                yield update
            finally:
                if update.committed:
                    self._workers.drop_weights()
                else:
                    self._streams.discard_weights("they were not used")
                    source.remove()

    async def update_weights_async(
        self, weights: str | Path | Mapping[str, Any], *, timeout: float | None = None
    ) -> int:
        """Do what `update_weights` does, in an asyncio program; streams go on meanwhile.

        A task that is cancelled leaves the update to itself: it goes on.

        Raises:
          WeightsError, EngineClosed, WorkerFailed: as `update_weights`.
        """
        import asyncio  # which only programs that use it should pay for

        return await asyncio.to_thread(self.update_weights, weights, timeout=timeout)
