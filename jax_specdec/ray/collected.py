"""The batches of one `generate`, between the threads that fetch them and its reader."""

import collections
import threading

from jax_specdec.ray.batch import ColumnBatch


class Collected:
    """A queue of batches whose writers wait where the reader is behind.

    Attributes:
      error: what ended the engine; raised behind the last batch.
    """

    def __init__(self, backlog: int) -> None:
        self.error: BaseException | None = None
        self._backlog = backlog
        self._batches: collections.deque[ColumnBatch] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False

    def wait_for_room(self) -> None:
        """Wait until fewer batches than the backlog are there."""
        with self._changed:
            while len(self._batches) >= self._backlog and not self._closed:
                self._changed.wait()

    def put(self, batch: ColumnBatch) -> None:
        """Add a batch, in any case."""
        with self._changed:
            if not self._closed:
                self._batches.append(batch)
                self._changed.notify_all()

    def next(self) -> ColumnBatch:
        """Wait for the next batch."""
        with self._changed:
            while not self._batches:
                self._changed.wait()
            batch = self._batches.popleft()
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        """Let nobody wait: there is no reader any more."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
