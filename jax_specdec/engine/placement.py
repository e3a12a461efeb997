"""Requests without a slot, and which of them gets which worker's next. Never jax."""

from collections.abc import Iterator, Sequence

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.engine.worker_session import WorkerSession


class Placement:
    """The queues of an engine. What one of them does takes no time that depends on its length."""

    def __init__(self) -> None:
        # In the order in which they will get a slot.
        self._to_prefill = WaitingQueue()
        self._to_decode = WaitingQueue()
        # Those that were lost with a worker: each gets a worker for itself, one after the other.
        self._to_try_alone = WaitingQueue()
        self._set_apart: WorkerSession | None = None  # the worker that they get

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return any(self._queues)

    def __len__(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._queues))

    @property
    def _queues(self) -> tuple[WaitingQueue, ...]:
        return self._to_try_alone, self._to_prefill, self._to_decode

    def enqueue(
        self, requests: Sequence[QueuedRequest], *, prefill: bool, first: bool = False
    ) -> None:
        """Queue requests in their order, behind those of their priority that wait or before them.

        Args:
          prefill: there are prefill workers.
          first: before them.
        """
        for queued in reversed(requests) if first else requests:
            # A request that has begun needs no prefill worker: a decode worker recomputes its
            # prompt anyway.
            queue = self._to_prefill if prefill and not queued.begun else self._to_decode
            if queued.alone:
                queue = self._to_try_alone
            (queue.appendleft if first else queue.append)(queued)

    def take(self, request_id: str) -> QueuedRequest | None:
        """Take a request out of its queue; None if it does not wait."""
        for queue in self._queues:
            if (queued := queue.take(request_id)) is not None:
                return queued
        return None

    def drain(self) -> Iterator[QueuedRequest]:
        """Take every request, one after the other."""
        for queue in self._queues:
            while queue:
                yield queue.popleft()

    def prefill_no_more(self) -> None:
        """Let what waits for a prefill worker wait for a decode worker: none is left."""
        self._to_decode.extend(self._to_prefill)
        self._to_prefill.clear()

    def places(
        self, sessions: Sequence[WorkerSession]
    ) -> Iterator[tuple[WorkerSession, QueuedRequest]]:
        """Give free slots to those that wait, always at the worker with most of them.

        A worker takes requests once it has loaded its model: what waits until then waits here. Each
        pair must be admitted before the next one is asked for.
        """
        yield from self._alone(sessions)
        for queue, prefill_only in ((self._to_prefill, True), (self._to_decode, False)):
            if not queue:
                continue
            fit = [
                session
                for session in sessions
                if session.prefill_only == prefill_only
                and session.ready
                and session is not self._set_apart
            ]
            while queue and fit:
                session = max(fit, key=lambda session: session.num_free)
                if not session.num_free:
                    break
                yield session, queue.popleft()

    def _alone(
        self, sessions: Sequence[WorkerSession]
    ) -> Iterator[tuple[WorkerSession, QueuedRequest]]:
        """Set one decode worker apart for requests that may end it, while there are any."""
        apart = self._set_apart
        if apart is not None and not apart.alive:
            apart = None
        if apart is None and self._to_try_alone:
            fit = [each for each in sessions if each.ready and not each.prefill_only]
            apart = max(fit, key=lambda session: session.num_free, default=None)
        self._set_apart = apart
        if apart is not None and not apart.request_ids:
            if self._to_try_alone:
                yield apart, self._to_try_alone.popleft()
            else:
                self._set_apart = None
