"""What a replica's engine has brought and nobody has fetched yet. Never jax."""

import collections
import threading
import time
from collections.abc import Iterator, Sequence

from jax_specdec.engine.updates import Update
from jax_specdec.records.batch import RecordBatch

MOST_BYTES = 32 << 20  # of messages that wait; then the engine waits
SLICE_SECONDS = 0.25


class Outbox:
    """A sink of an engine: its thread fills it, one reader takes whole steps out.

    Attributes:
      steps: of all workers, so far.
      events: what became of lost workers, the latest last; a few of them.
    """

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._batches: list[RecordBatch] = []
        self._bytes = 0
        self._error: BaseException | None = None
        self._closed = False
        self._reader = 0  # the last one: earlier ones end
        self.steps = 0
        self.events: collections.deque[str] = collections.deque(maxlen=8)

    def take(self, update: Update) -> None:
        """Keep an update; waits while too much waits."""
        with self._ready:
            while self._bytes > MOST_BYTES and not self._closed:
                self._ready.wait(SLICE_SECONDS)
            self.steps += update.message is not None
            if update.lost is not None:
                self.events.append(update.lost.report)
            if update.records.batches:
                self._batches.extend(update.records.batches)
                self._bytes += 0 if update.message is None else update.message.num_bytes
                self._ready.notify_all()

    def fail(self, error: BaseException) -> None:
        """Note that no further update comes."""
        with self._ready:
            self._error = self._error or error
            self._ready.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def clear(self) -> None:
        """Forget what waits, and end the readers that there are."""
        with self._ready:
            self._reader += 1
            self._batches, self._bytes = [], 0
            self._ready.notify_all()

    def read(self, pause: float) -> Iterator[Sequence[RecordBatch] | BaseException]:
        """Yield what came since the last time, at most every `pause` seconds; at last the error."""
        with self._ready:
            reader = self._reader
        last = 0.0
        while True:
            with self._ready:
                while not (self._batches or self._error or self._closed):
                    if reader != self._reader:
                        return
                    self._ready.wait(SLICE_SECONDS)
            if (left := last + pause - time.monotonic()) > 0:
                time.sleep(left)
            with self._ready:
                if reader != self._reader:
                    return
                taken, self._batches, self._bytes = self._batches, [], 0
                error, over = self._error, self._closed
                self._ready.notify_all()
            last = time.monotonic()
            if taken:
                yield taken
            elif error is not None:
                yield error
                return
            elif over:
                return
