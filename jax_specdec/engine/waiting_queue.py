"""Requests that wait for a slot, in their order; any of them can leave at once."""

import bisect
import collections
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from jax_specdec.requests import Request


class Waiting(Protocol):
    """An item that can wait: `QueuedRequest`, or a fleet's `Entry`."""

    @property
    def request(self) -> Request: ...

    @property
    def priority(self) -> int: ...


Q = TypeVar("Q", bound=Waiting)


class WaitingQueue(Generic[Q]):
    """A queue of requests with different ids: a lower priority first, then first come first served.

    No operation depends on how many requests wait, only a little on how many priorities they have.
    Iterating over it, `extend` and `clear` take a time in proportion to the requests concerned.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, collections.OrderedDict[str, Q]] = {}
        self._order: list[int] = []  # the priorities that wait, ascending
        self._priorities: dict[str, int] = {}  # by request id

    def __len__(self) -> int:
        return len(self._priorities)

    def __iter__(self) -> Iterator[Q]:
        for priority in self._order:
            yield from self._lanes[priority].values()

    def append(self, queued: Q) -> None:
        """Let a request wait behind all others of its priority."""
        self._lane(queued)[queued.request.id] = queued

    def appendleft(self, queued: Q) -> None:
        """Let a request wait before all others of its priority."""
        lane = self._lane(queued)
        lane[queued.request.id] = queued
        lane.move_to_end(queued.request.id, last=False)

    def extend(self, queued: Iterable[Q]) -> None:
        """Let requests wait behind all others of their priority, in their order."""
        for request in queued:
            self.append(request)

    def popleft(self) -> Q:
        """Take the request that waits before all others. Raises KeyError if none waits."""
        if not self._order:
            raise KeyError("no request waits")
        name = next(iter(self._lanes[self._order[0]]))
        return self._taken(name, self._priorities.pop(name))

    def take(self, request_id: str) -> Q | None:
        """Take the request with this id; None if it does not wait here."""
        priority = self._priorities.pop(request_id, None)
        return None if priority is None else self._taken(request_id, priority)

    def clear(self) -> None:
        """Forget all requests."""
        self._lanes.clear()
        self._order.clear()
        self._priorities.clear()

    def _lane(self, queued: Q) -> collections.OrderedDict[str, Q]:
        """Where requests of its priority wait; from now on it is one of them."""
        priority = queued.priority
        self._priorities[queued.request.id] = priority
        if priority not in self._lanes:
            self._lanes[priority] = collections.OrderedDict()
            bisect.insort(self._order, priority)
        return self._lanes[priority]

    def _taken(self, name: str, priority: int) -> Q:
        lane = self._lanes[priority]
        queued = lane.pop(name)
        if not lane:
            del self._lanes[priority]
            del self._order[bisect.bisect_left(self._order, priority)]
        return queued
