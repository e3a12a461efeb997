"""Requests that wait for one kind of worker, of which no group takes all slots.

A group is what one caller has asked for together, such as the choices of an HTTP request. One
request of each group stands in the queue, and its next one behind all others once that has a slot:
so slots are given to groups in turn. Of a group that has a slot, none takes the slots that are kept
for groups without one: an eighth of all, and one at least where there are two. A request without a
group is a group of its own.
"""

import collections
from collections.abc import Container, Iterator

from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.waiting_queue import WaitingQueue

_SHARE = 8  # one slot of so many is kept


def kept_slots(num_slots: int) -> int:
    """How many slots of so many are kept for groups that have none."""
    return max(num_slots // _SHARE, 1) if num_slots > 1 else 0


class Turns:
    """The queue. No operation takes a time that depends on its length, but iterating and `clear`.

    `pop` looks at one request of each group that has a slot or had one at the last look: as many as
    there are slots at most.
    """

    def __init__(self) -> None:
        self._first: WaitingQueue[QueuedRequest] = WaitingQueue()  # of groups without a slot
        self._further: WaitingQueue[QueuedRequest] = WaitingQueue()  # of those that have or had one
        self._standing: dict[str, QueuedRequest] = {}  # of each group, in one of these
        self._behind: dict[str, collections.OrderedDict[str, QueuedRequest]] = {}  # by group and id
        self._groups: dict[str, str] = {}  # by request id, of those behind

    def __len__(self) -> int:
        return len(self._first) + len(self._further) + len(self._groups)

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self._first
        yield from self._further
        for line in self._behind.values():
            yield from line.values()

    def append(self, queued: QueuedRequest) -> None:
        """Let a request wait behind those of its priority, or behind its group."""
        group = queued.group
        if group in self._standing:
            self._behind.setdefault(group, collections.OrderedDict())[queued.request.id] = queued
            self._groups[queued.request.id] = group
            return
        self._stand(queued, self._first)

    def appendleft(self, queued: QueuedRequest) -> None:
        """Let a request that had a slot wait before all others of its priority."""
        self._first.appendleft(queued)

    def pop(self, holding: Container[str], *, all_slots: bool) -> QueuedRequest | None:
        """Take the request whose turn it is; None where none may have a slot now.

        Args:
          holding: the groups that have a slot.
          all_slots: more slots are free than are kept.
        """
        for queued in [request for request in self._further if request.group not in holding]:
            self._further.take(queued.request.id)
            self._first.append(queued)
        while self._first and self._waits_further(next(iter(self._first)), holding):
            self._further.append(self._first.popleft())
        queues = [self._first, self._further] if all_slots else [self._first]
        heads = [(next(iter(queue)).priority, queue) for queue in queues if queue]
        if not heads:
            return None
        queued = min(heads, key=lambda pair: pair[0])[1].popleft()
        self._follow(queued, self._further)
        return queued

    def take(self, request_id: str) -> QueuedRequest | None:
        """Take the request with this id; None if it does not wait here."""
        if (group := self._groups.pop(request_id, None)) is not None:
            line = self._behind[group]
            queued = line.pop(request_id)
            if not line:
                del self._behind[group]
            return queued
        for queue in (self._first, self._further):
            if (request := queue.take(request_id)) is not None:
                self._follow(request, queue)
                return request
        return None

    def clear(self) -> None:
        """Forget all requests."""
        for held in (self._first, self._further, self._standing, self._behind, self._groups):
            held.clear()

    def _waits_further(self, head: QueuedRequest, holding: Container[str]) -> bool:
        """Whether its group has a slot, and it was not taken out of one."""
        return bool(head.group) and head.group in holding and not head.had_slot

    def _stand(self, queued: QueuedRequest, queue: WaitingQueue[QueuedRequest]) -> None:
        if queued.group:
            self._standing[queued.group] = queued
        queue.append(queued)

    def _follow(self, queued: QueuedRequest, queue: WaitingQueue[QueuedRequest]) -> None:
        """Let the next one of a group stand where one stood that has left."""
        group = queued.group
        if self._standing.get(group) is not queued:
            return
        del self._standing[group]
        line = self._behind.get(group)
        if line:
            name, following = line.popitem(last=False)
            del self._groups[name]
            if not line:
                del self._behind[group]
            self._stand(following, queue)
