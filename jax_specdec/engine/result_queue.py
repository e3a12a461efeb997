"""Items of many requests for one reader, in order, until all the requests have ended."""

import collections
import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class ResultQueue(Generic[Item]):
    """A queue that ends once all its requests have; its writers wait where the reader is behind.

    Iterating raises what ended requests early, after the last item.
    """

    def __init__(
        self, num_requests: int, limit: int, made_room: Callable[[], object] | None = None
    ) -> None:
        """Begin with nothing.

        Args:
          num_requests: how many will end.
          limit: items with which the reader counts as behind.
          made_room: called by the reader when that is over.
        """
        self._left, self._limit, self._made_room = num_requests, limit, made_room
        self._items: collections.deque[Item] = collections.deque()
        self.changed = threading.Condition()
        self._error: BaseException | None = None
        self.abandoned = False

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._left

    @property
    def num_waiting(self) -> int:
        """Items that the reader has not taken."""
        return len(self._items)

    @property
    def has_room(self) -> bool:
        """Whether fewer items wait than the limit, or no more come, or nobody reads them."""
        return len(self._items) < self._limit or self._left <= 0 or self.abandoned

    def wait_for_room(self) -> None:
        """Wait until `has_room`."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_room)

    def put(self, item: Item) -> None:
        """Add an item, in any case; its reader gets it after the next `wake`, if it waits."""
        with self.changed:
            if not self.abandoned:
                self._items.append(item)

    def wake(self) -> None:
        """Let the reader have what came: another thread that runs takes time from this one."""
        if self._items:
            with self.changed:
                self.changed.notify_all()

    def finish(self, error: BaseException | None = None, count: int = 1) -> None:
        """Note that requests have ended, by an error or without; their last items are here.

        It is not called `close`, for a `yield from` that is left calls that.
        """
        with self.changed:
            self._left -= count
            self._error = self._error or error
            if self._left <= 0:
                self.changed.notify_all()

    def abandon(self) -> None:
        """Forget what waits: there is no reader any more."""
        with self.changed:
            self.abandoned = True
            self._items.clear()
            self.changed.notify_all()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        with self.changed:
            self.changed.wait_for(lambda: self._items or self._left <= 0)
            if not self._items:
                raise self._error or StopIteration
            was_behind = not self.has_room
            item = self._items.popleft()
            self.changed.notify_all()
        if was_behind and self.has_room and self._made_room is not None:
            self._made_room()
        return item
