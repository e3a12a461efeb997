"""The search for the request that ended a worker, among those that were lost with it.

Half of them, the newest first, are tried on a worker that gets no unknown ones meanwhile. Those
that get on there are cleared, and run on; the search goes on in the other half. Where that worker
is lost too, it was one of the half that ran, and the other half is cleared instead. So one of n is
found in log2(n) + 1 tries, each of which lasts for a few steps: nobody waits for a request's end.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.waiting_queue import WaitingQueue
from jax_specdec.engine.worker_session import WorkerSession

# A try's worker takes no other requests meanwhile; a long prompt may last longer, and then it does.
APART_SECONDS = 10.0


@dataclass(frozen=True)
class Loss:
    """What the loss of a worker says of its requests.

    Attributes:
      suspects: ids of those that may have ended it, in order of admission.
      tried: they are fewer than before: they were being tried.
      cleared: requests that waited for their own try, and need none any more.
    """

    suspects: tuple[str, ...]
    tried: bool
    cleared: tuple[QueuedRequest, ...] = ()

    def in_order(self, names: Sequence[str]) -> Sequence[str]:
        """Requests in the order in which they came: a try had begun with the newest."""
        if not self.tried:
            return names
        return [*_without(names, frozenset(self.suspects)), *reversed(self.suspects)]


class Trials:
    """Requests that wait for a try, and those that are being tried."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        """Begin with none.

        Args:
          one_by_one: try single requests, not halves: where a lost worker is not replaced, more
            tries are better than more losses.
        """
        self._one_by_one = one_by_one
        # One set for each loss, the newest request first. While a group is tried, the first set has
        # what is left of its own.
        self._sets: deque[dict[str, QueuedRequest]] = deque()
        self._group: tuple[str, ...] = ()
        self._session: WorkerSession | None = None  # gets the group
        self._until = 0.0

    def __len__(self) -> int:
        """How many requests wait for a try."""
        return sum(map(len, self._sets))

    def add(self, suspects: Sequence[QueuedRequest]) -> None:
        """Let the requests of one loss wait, in the order in which they will be tried."""
        if suspects:
            self._sets.append({queued.request.id: queued for queued in suspects})

    def take(self, request_id: str) -> QueuedRequest | None:
        """Take a request out; None if it does not wait here."""
        for one in self._sets:
            if (queued := one.pop(request_id, None)) is not None:
                return queued
        return None

    def drain(self) -> Iterator[QueuedRequest]:
        """Take every request, one after the other."""
        for one in self._sets:
            while one:
                yield one.pop(next(iter(one)))

    def lost(self, session: WorkerSession) -> Loss:
        """Whom the loss of a worker may be put down to; a try there has failed."""
        if self._session is not session or not self._running():
            return Loss(session.request_ids, tried=False)
        cleared = tuple(replace(queued, losses=()) for queued in self._sets.popleft().values())
        self._group, self._session = (), None
        # Requests that came after a try had lasted too long are no better known.
        known = frozenset(name for name in session.request_ids if session.gets_on(name))
        return Loss(_without(session.request_ids, known), tried=True, cleared=cleared)

    def apart(self, now: float) -> WorkerSession | None:
        """The worker that gets no others now."""
        lasts_too_long = bool(self._group) and now >= self._until
        return None if lasts_too_long else self._session

    def places(
        self, sessions: Sequence[WorkerSession], now: float
    ) -> Iterator[tuple[WorkerSession, QueuedRequest]]:
        """Begin the next try where the one before is over; each pair is to be admitted at once."""
        if self._running():
            return
        while self._sets and not self._sets[0]:
            self._sets.popleft()
        if not self._sets:
            self._session = None
            return
        session = self._session
        if session is None or not session.ready:
            fit = [each for each in sessions if each.ready and not each.prefill_only]
            session = self._session = max(fit, key=lambda each: each.num_free, default=None)
        if session is None or not session.num_free:
            return
        if not all(map(session.gets_on, session.request_ids)):
            return
        suspects = self._sets[0]
        size = 1 if self._one_by_one else -(-len(suspects) // 2)
        self._group = tuple(suspects)[: min(size, session.num_free)]
        self._until = now + APART_SECONDS
        for name in self._group:
            yield session, suspects.pop(name)

    def _running(self) -> bool:
        """Whether a try is on; who has got on, or has ended, is no part of it any more."""
        session = self._session
        if self._group and session is not None:
            here = session.request_ids
            self._group = tuple(
                name for name in self._group if name in here and not session.gets_on(name)
            )
        return bool(self._group)


def _without(names: Iterable[str], others: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


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
