"""Requests that wait for a slot, and the trial of those that were lost with a worker.

One of them may be what ended it. So each runs again while its worker gets no other new ones, until
it gets on: only what is lost alone is to blame. Nobody waits for a request's end.
"""

import itertools
from collections.abc import Iterator, Sequence

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.turns import Turns, kept_slots
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.engine.worker_session import WorkerSession

# A try's worker takes no other requests meanwhile; a long prompt may last longer, and then it does.
APART_SECONDS = 10.0


class Placement:
    """The queues of an engine. What one of them does takes no time that depends on its length."""

    def __init__(self) -> None:
        """Begin without requests."""
        # In the order in which they will get a slot.
        self._suspects: WaitingQueue[QueuedRequest] = WaitingQueue()
        self._to_prefill, self._to_decode = Turns(), Turns()
        self._queues = self._suspects, self._to_prefill, self._to_decode
        self._tried = ""  # the id of a suspect
        self._apart: WorkerSession | None = None  # gets it
        self._until = 0.0

    def __len__(self) -> int:
        """How many requests wait."""
        return sum(len(queue) for queue in self._queues)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All that wait."""
        return itertools.chain.from_iterable(self._queues)

    def enqueue(
        self, requests: Sequence[QueuedRequest], *, prefill: bool, first: bool = False
    ) -> None:
        """Queue requests in their order, behind those of their priority that wait or before them.

        Those that may be to blame for a loss are tried, the last one first.

        Args:
          prefill: there are prefill workers.
          first: before them.
        """
        self._suspects.extend(queued for queued in reversed(requests) if queued.losses)
        for queued in reversed(requests) if first else requests:
            if queued.losses:
                continue
            # A request that has begun needs no prefill worker: a decode worker recomputes its
            # prompt anyway.
            queue = self._to_prefill if prefill and not queued.begun else self._to_decode
            (queue.appendleft if first else queue.append)(queued)

    def take(self, request_id: str) -> QueuedRequest | None:
        """Take a request out of its queue; None if it does not wait."""
        requests = (queue.take(request_id) for queue in self._queues)
        return next((queued for queued in requests if queued is not None), None)

    def drain(self) -> Iterator[QueuedRequest]:
        """Take every request, one after the other."""
        for queue in self._queues:
            waiting = list(queue)
            queue.clear()
            yield from waiting

    def suspects(self, session: WorkerSession) -> tuple[str, ...]:
        """Whom the loss of a worker may be put down to, in order of admission."""
        if session is not self._apart or not self._trying():
            return session.request_ids
        self._tried, self._apart = "", None
        # Requests that came after the try had lasted too long are no better known.
        return tuple(name for name in session.request_ids if not session.gets_on(name))

    def prefill_no_more(self) -> None:
        """Let what waits for a prefill worker wait for a decode worker: none is left."""
        for queued in list(self._to_prefill):
            self._to_decode.append(queued)
        self._to_prefill.clear()

    def places(
        self, sessions: Sequence[WorkerSession], now: float
    ) -> Iterator[tuple[WorkerSession, QueuedRequest]]:
        """Give free slots to those that wait, always at the worker with most of them.

        `Turns` says whose turn it is.
        A worker takes requests once it has loaded its model: what waits until then waits here. Each
        pair must be admitted before the next one is asked for.
        """
        if not self._trying():
            yield from self._next_try(sessions, now)
        apart = None if self._trying() and now >= self._until else self._apart
        for queue, prefill_only in ((self._to_prefill, True), (self._to_decode, False)):
            if not queue:
                continue
            fit = [
                session
                for session in sessions
                if session.prefill_only == prefill_only and session.ready and session is not apart
            ]
            holding = {group for session in sessions for group in session.groups}
            num_kept_slots = kept_slots(sum(session.state.num_slots for session in fit))
            while queue and fit:
                session = max(fit, key=lambda session: session.num_free)
                if not session.num_free:
                    break
                free = sum(session.num_free for session in fit)
                queued = queue.pop(holding, all_slots=free > num_kept_slots)
                if queued is None:
                    break
                holding.add(queued.group)
                yield session, queued

    def _trying(self) -> bool:
        """Whether a try is on; who has got on, or has ended, is tried no more."""
        session = self._apart
        if session is None or self._tried not in session.request_ids:
            return False
        return not session.gets_on(self._tried)

    def _next_try(
        self, sessions: Sequence[WorkerSession], now: float
    ) -> Iterator[tuple[WorkerSession, QueuedRequest]]:
        """The next suspect, once all requests of the worker that it will get have got on."""
        if not self._suspects:
            self._apart = None
            return
        if self._apart is None or not self._apart.ready:
            fit = [session for session in sessions if session.ready and not session.prefill_only]
            self._apart = max(fit, key=lambda session: session.num_free, default=None)
        session = self._apart
        if session and session.num_free and all(map(session.gets_on, session.request_ids)):
            queued = self._suspects.popleft()
            self._tried, self._until = queued.request.id, now + APART_SECONDS
            yield session, queued
