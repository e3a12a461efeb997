"""What a replica's engine has brought and nobody has fetched yet."""

import collections
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from jax_specdec.engine.updates import Update
from jax_specdec.records.batch import RecordBatch

MAX_WAITING_BYTES = 32 << 20  # of messages that wait; then the engine waits
MAX_BATCH_BYTES = 4 << 20  # of messages in a batch, one more message not counted
SLICE_SECONDS = 0.25


class SendQueue:
    """A sink of an engine: its thread fills it, one reader takes whole steps out.

    Attributes:
      steps: of all workers, so far.
      events: what became of lost workers, the latest last; a few of them.
    """

    def __init__(self) -> None:
        lock = threading.RLock()
        self._ready, self._hurry = threading.Condition(lock), threading.Condition(lock)
        self._updates: collections.deque[tuple[Sequence[RecordBatch], int]] = collections.deque()
        self._bytes = 0
        self._error: BaseException | None = None
        self._closed = False
        self._open = 0  # requests that have not ended
        self._reader = 0  # the last one: earlier ones end
        self.steps = 0
        self.events: collections.deque[str] = collections.deque(maxlen=8)

    def expect(self, requests: int) -> None:
        """Note that so many more requests run; once all have ended, no reader waits for more."""
        with self._ready:
            self._open += requests

    def take(self, update: Update) -> None:
        """Keep an update; waits while too much waits."""
        with self._ready:
            while self._bytes > MAX_WAITING_BYTES and not self._closed:
                self._ready.wait(SLICE_SECONDS)
            self.steps += update.message is not None
            if update.lost is not None:
                self.events.append(update.lost.report)
            if update.records.batches:
                size = 0 if update.message is None else update.message.num_bytes
                self._updates.append((update.records.batches, size))
                self._bytes += size
                self._ready.notify_all()
                self._note_ends(update.records.batches)
                if self._bytes >= MAX_BATCH_BYTES:
                    self._hurry.notify_all()

    def fail(self, error: BaseException) -> None:
        """Note that no further update comes."""
        with self._ready:
            self._error = self._error or error
            self._ready.notify_all()
            self._hurry.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
            self._hurry.notify_all()

    def clear(self) -> None:
        """Forget what waits, and end the readers that there are."""
        with self._ready:
            self._reader += 1
            self._updates.clear()
            self._bytes = self._open = 0
            self._ready.notify_all()
            self._hurry.notify_all()

    def read(self, pause: float) -> Iterator[Sequence[RecordBatch] | BaseException]:
        """Yield what came since the last time, at most every `pause` seconds; at last the error.

        Where nobody read for long, it comes in several parts: a batch is one object of a store.
        What fills a batch does not wait, nor does the last of all requests' ends.
        """
        with self._ready:
            reader = self._reader
        last = time.monotonic() - pause  # the first part does not wait
        while True:
            with self._ready:
                while not (self._updates or self._error or self._closed):
                    if reader != self._reader:
                        return
                    self._ready.wait(SLICE_SECONDS)
            with self._hurry:
                self._hurry.wait_for(self._may_leave, last + pause - time.monotonic())
                if reader != self._reader:
                    return
                taken = self._part()
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

    def _note_ends(self, batches: Sequence[RecordBatch]) -> None:
        """Count requests that have ended; the lock is held."""
        if self._open:
            ends = sum(int(np.count_nonzero(batch.finish_reason)) for batch in batches)
            self._open = max(self._open - ends, 0)
            if not self._open:
                self._hurry.notify_all()

    def _may_leave(self) -> bool:
        full = self._bytes >= MAX_BATCH_BYTES
        return full or not self._open or self._closed or self._error is not None

    def _part(self) -> Sequence[RecordBatch]:
        """Take the first of what waits out, up to the size of a batch; the lock is held."""
        taken: list[RecordBatch] = []
        size = 0
        while self._updates and size < MAX_BATCH_BYTES:
            batches, more = self._updates.popleft()
            taken += batches
            size += more
        self._bytes -= size
        return taken
