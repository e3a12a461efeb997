"""One request's records for its consumer: a thread, or a task of asyncio.

The engine's thread puts records in, and waits for nobody: a consumer that is too far behind is told
so, and its request ends.
"""

import collections
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from jax_specdec.engine.errors import StreamBehind
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Request
from jax_specdec.wording import pluralize

if TYPE_CHECKING:
    import asyncio


class Delivered(Protocol):
    """An item of a stream: a `Record`, or one that has a finish reason as it has."""

    @property
    def finish_reason(self) -> FinishReason | None: ...


_T = TypeVar("_T", bound=Delivered)


class Stream(Generic[_T]):
    """The records of one request, as they come: iterate over it, with `for` or `async for`.

    The last record has a finish reason; then the iteration ends. One consumer at a time. Leaving a
    `with` block ends the request if it still runs.

    Attributes:
      request: the request.
      finish_reason: why it ended; None until the engine has delivered its last record here, whether
        or not that was read.

    Iterating raises:
      WorkerFailed: the engine has stopped because of a lost worker; after the last record.
      StreamBehind: more records waited here than may; after those that did.
      EngineClosed: the engine ended first.
    """

    def __init__(
        self,
        request: Request,
        end: Callable[["Stream[_T]", FinishReason], None],
        *,
        max_backlog: int,
    ) -> None:
        """Begin with no records.

        Args:
          request: the request.
          end: asks the engine to end the request for a reason; any thread may call it.
          max_backlog: records that may wait here.
        """
        self.request = request
        self.finish_reason: FinishReason | None = None
        self._end, self._max_backlog = end, max_backlog
        self._records: collections.deque[_T] = collections.deque()
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._wake: Callable[[], object] | None = None

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """End the request; its last record has the reason, unless it has ended for another."""
        if not self._over:
            self._end(self, reason)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        while True:
            ready = threading.Event()
            record = self._take(ready.set)
            if record is not None:
                return record
            if self._finished():
                raise StopIteration
            ready.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        import asyncio  # which only programs that use it should pay for

        loop = asyncio.get_running_loop()
        while True:
            ready = loop.create_future()
            record = self._take(partial(loop.call_soon_threadsafe, _set, ready))
            if record is not None:
                return record
            if self._finished():
                raise StopAsyncIteration
            await ready

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    @property
    def num_waiting(self) -> int:
        """Records that were not read yet."""
        return len(self._records)

    def put(self, record: _T) -> bool:
        """Add a record, for the engine's thread; False where it was one too many."""
        if record.finish_reason is not None:
            self.finish_reason = record.finish_reason
        with self._lock:
            if self._over:  # nobody reads what comes after an error
                return True
            if len(self._records) < self._max_backlog:
                self._records.append(record)
                self._call()
                return True
        self.finish(
            StreamBehind(
                f"request {self.request.id!r}: {pluralize(self._max_backlog, 'record')} wait to be "
                "read, as many as may (EngineConfig.max_backlog): its consumer is too slow. The "
                "request was ended"
            )
        )
        return False

    def finish(self, error: BaseException | None = None) -> None:
        """End the stream behind the records that it has, for the engine's thread."""
        with self._lock:
            if self._over:
                return
            self._over, self._error = True, error
            self._call()

    def _take(self, wake: Callable[[], object]) -> _T | None:
        """The next record; without one, `wake` is called once that may have changed."""
        with self._lock:
            if self._records:
                return self._records.popleft()
            self._wake = None if self._over else wake
            return None

    def _finished(self) -> bool:
        """Whether the stream is over; raises what ended it early."""
        with self._lock:
            if not self._over or self._records:
                return False
            if self._error is not None:
                raise self._error
            return True

    def _call(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            try:
                wake()
            except RuntimeError:  # the consumer's event loop has ended, and so has the consumer
                self._over = True


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
