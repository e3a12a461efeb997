"""Messages of a replica's engine that nobody has fetched yet."""

import collections
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from jax_specdec.engine.updates import Update
from jax_specdec.records.batch import RecordBatch

MAX_WAITING_BYTES = 32 << 20  # of messages that wait; then the engine waits
MAX_BATCH_BYTES = 8 << 20  # of messages in a batch, one more message not counted
QUEUE_LOOK_SECONDS = 0.25
# A message that was in the ring for so long: its worker is faster than the engine. Then small
# batches, which all cost the same, would only hold the engine up: tokens wait for it anyway.
BEHIND_NS = 2_000_000
PAUSES_BEHIND = 3  # between two batches
LATE_SECONDS = 0.002  # beyond a pause: no update came meanwhile, so the reader makes the batch
Made = TypeVar("Made")


class SendQueue(Generic[Made]):
    """A sink of an engine: its thread fills it, one reader takes batches of whole steps out.

    The engine's thread makes a batch when one is due. Were it the reader's, two threads would
    compute at once, and each wait for Python's lock at every call of NumPy: twice the time of both.

    Attributes:
      steps: of all workers, so far.
      events: what became of lost workers, the latest last; a few of them.
    """

    def __init__(self, make: Callable[[Sequence[RecordBatch]], Made]) -> None:
        """Begin empty; `make` gets the records of some steps, and is called by one at a time."""
        self._make = make
        self.ready = threading.Condition(threading.RLock())
        self._updates: collections.deque[tuple[Sequence[RecordBatch], int]] = collections.deque()
        self._bytes = 0
        self._made: list[Made] = []  # one, or none
        self._error: BaseException | None = None
        self._closed = False
        self._open = 0  # requests that have not ended
        self._reader = 0  # the last one: earlier ones end
        self.waits = -1  # the reader that waits: for another one nothing is made
        self._pause, self._last = math.inf, 0.0
        self._pauses = 1
        self.steps = 0
        self.events: collections.deque[str] = collections.deque(maxlen=8)

    def expect(self, requests: int) -> None:
        """Note that so many more requests run; once all have ended, no reader waits for more."""
        with self.ready:
            self._open += requests

    def take(self, update: Update) -> None:
        """Keep an update; waits while too much waits."""
        with self.ready:
            while self._bytes > MAX_WAITING_BYTES and not self._closed:
                self.ready.wait(QUEUE_LOOK_SECONDS)
            self.steps += update.message is not None
            if update.latency_ns is not None:
                self._pauses = PAUSES_BEHIND if update.latency_ns > BEHIND_NS else 1
            if update.lost is not None:
                self.events.append(update.lost.report)
            if update.records.batches:
                size = 0 if update.message is None else update.message.num_bytes
                self._updates.append((update.records.batches, size))
                self._bytes += size
                self._note_ends(update.records.batches)
                if self._wait_seconds() <= 0:
                    # A reader that is busy makes it itself, of all that has come by then; but two
                    # threads that compute would hold up an engine that is behind already.
                    behind = self._pauses > 1 and self._pause < math.inf
                    if (behind or self.waits == self._reader) and not (self._made or self._closed):
                        self._make_one()
                    self.ready.notify_all()

    def fail(self, error: BaseException) -> None:
        """Note that no further update comes."""
        with self.ready:
            self._error = self._error or error
            self.ready.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self.ready:
            self._closed = True
            self.ready.notify_all()

    def clear(self) -> None:
        """Forget what waits, and end the readers that there are."""
        with self.ready:
            self._reader += 1
            self._updates.clear()
            self._made.clear()
            self._bytes = self._open = 0
            self._pause = math.inf
            self.ready.notify_all()

    def read(self, pause: float) -> Iterator[Made | BaseException]:
        """Yield what came since the last time, at most every `pause` seconds; at last the error.

        Three times as seldom, while the engine is behind its workers.
        Where nobody read for long, it comes in several parts: a batch is one object of a store.
        What fills a batch does not wait, nor does the last of all requests' ends.
        """
        with self.ready:
            reader = self._reader
            self._pause, self._last = pause, time.monotonic() - pause  # the first one does not wait
        while True:
            with self.ready:
                if reader != self._reader:
                    return
                self.waits, since = reader, time.monotonic()
                while reader == self._reader and not self._made and (
                    seconds := self._wait_seconds(since)
                ) > 0:  # fmt: skip
                    self.ready.wait(min(seconds, QUEUE_LOOK_SECONDS))
                if reader != self._reader:
                    return
                self.waits = -1
                if self._updates and not self._made:
                    self._make_one()
                made, self._made = self._made, []
                error, over = self._error, self._closed
                self.ready.notify_all()
            if made:
                yield made[0]
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

    def _wait_seconds(self, since: float | None = None) -> float:
        """Seconds until a batch is due; `since` then a reader waits for it. The lock is held."""
        if self._closed or self._error is not None:
            return 0.0
        if self._updates and (self._bytes >= MAX_BATCH_BYTES or not self._open):
            return 0.0
        due = self._last + self._pauses * self._pause
        if since is not None:
            due = max(due, since) + LATE_SECONDS
        seconds = due - time.monotonic()
        return seconds if self._updates or seconds > 0 else math.inf

    def _make_one(self) -> None:
        """Make a batch of the first of what waits, up to its size; the lock is held.

        An error ends the queue, for its reader too: behind rows that are missing, none may come.
        """
        taken: list[RecordBatch] = []
        size = 0
        while self._updates and size < MAX_BATCH_BYTES:
            batches, more = self._updates.popleft()
            taken += batches
            size += more
        self._bytes -= size
        try:
            self._made.append(self._make(taken))
        except BaseException as error:
            self._updates.clear()
            self._bytes = 0
            self.fail(error)
            raise
        self._last = time.monotonic()
