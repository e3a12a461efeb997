"""Requests without a slot, and which of them gets which worker's next."""

from collections.abc import Iterator, Sequence

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.trials import Loss, Trials
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.engine.worker_session import WorkerSession


class Placement:
    """The queues of an engine. What one of them does takes no time that depends on its length."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        """Begin without requests; `one_by_one` as for `Trials`."""
        # In the order in which they will get a slot.
        self._to_prefill: WaitingQueue[QueuedRequest] = WaitingQueue()
        self._to_decode: WaitingQueue[QueuedRequest] = WaitingQueue()
        self._trials = Trials(one_by_one=one_by_one)

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(len(self))

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._trials) + sum(map(len, self._queues))

    @property
    def _queues(self) -> tuple[WaitingQueue[QueuedRequest], ...]:
        return self._to_prefill, self._to_decode

    def enqueue(
        self, requests: Sequence[QueuedRequest], *, prefill: bool, first: bool = False
    ) -> None:
        """Queue requests in their order, behind those of their priority that wait or before them.

        Those that may be to blame for a loss are tried, the last one first.

        Args:
          prefill: there are prefill workers.
          first: before them.
        """
        self._trials.add([queued for queued in reversed(requests) if queued.losses])
        for queued in reversed(requests) if first else requests:
            if queued.losses:
                continue
            # A request that has begun needs no prefill worker: a decode worker recomputes its
            # prompt anyway.
            queue = self._to_prefill if prefill and not queued.begun else self._to_decode
            (queue.appendleft if first else queue.append)(queued)

    def take(self, request_id: str) -> QueuedRequest | None:
        """Take a request out of its queue; None if it does not wait."""
        if (queued := self._trials.take(request_id)) is not None:
            return queued
        for queue in self._queues:
            if (queued := queue.take(request_id)) is not None:
                return queued
        return None

    def drain(self) -> Iterator[QueuedRequest]:
        """Take every request, one after the other."""
        yield from self._trials.drain()
        for queue in self._queues:
            while queue:
                yield queue.popleft()

    def lost(self, session: WorkerSession) -> Loss:
        """Whom the loss of a worker may be put down to."""
        return self._trials.lost(session)

    def prefill_no_more(self) -> None:
        """Let what waits for a prefill worker wait for a decode worker: none is left."""
        self._to_decode.extend(self._to_prefill)
        self._to_prefill.clear()

    def places(
        self, sessions: Sequence[WorkerSession], now: float
    ) -> Iterator[tuple[WorkerSession, QueuedRequest]]:
        """Give free slots to those that wait, always at the worker with most of them.

        A worker takes requests once it has loaded its model: what waits until then waits here. Each
        pair must be admitted before the next one is asked for.
        """
        yield from self._trials.places(sessions, now)
        apart = self._trials.apart(now)
        for queue, prefill_only in ((self._to_prefill, True), (self._to_decode, False)):
            if not queue:
                continue
            fit = [
                session
                for session in sessions
                if session.prefill_only == prefill_only and session.ready and session is not apart
            ]
            while queue and fit:
                session = max(fit, key=lambda session: session.num_free)
                if not session.num_free:
                    break
                yield session, queue.popleft()
