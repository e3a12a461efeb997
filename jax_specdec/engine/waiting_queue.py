"""Requests that wait for a slot, in their order; any of them can leave at once. Never jax."""

import collections
from collections.abc import Iterable, Iterator

from jax_specdec.engine.queued_request import QueuedRequest


class WaitingQueue:
    """A queue of requests with different ids, for which no operation depends on its length.

    Iterating over it, `extend` and `clear` take a time in proportion to the requests concerned.
    """

    def __init__(self) -> None:
        self._by_id: collections.OrderedDict[str, QueuedRequest] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._by_id.values())

    def append(self, queued: QueuedRequest) -> None:
        """Let a request wait behind all others."""
        self._by_id[queued.request.id] = queued

    def appendleft(self, queued: QueuedRequest) -> None:
        """Let a request wait before all others."""
        self._by_id[queued.request.id] = queued
        self._by_id.move_to_end(queued.request.id, last=False)

    def extend(self, queued: Iterable[QueuedRequest]) -> None:
        """Let requests wait behind all others, in their order."""
        for one in queued:
            self.append(one)

    def popleft(self) -> QueuedRequest:
        """Take the request that waits before all others. Raises KeyError if none waits."""
        return self._by_id.popitem(last=False)[1]

    def take(self, request_id: str) -> QueuedRequest | None:
        """Take the request with this id; None if it does not wait here."""
        return self._by_id.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._by_id.clear()
