"""A server's log of its work, and its end where its engine has stopped for good."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from jax_specdec.cli import standard_output
from jax_specdec.engine import Engine
from jax_specdec.records.batch import Statistics
from jax_specdec.serve.listener import Listener
from jax_specdec.wording import pluralize

logger = logging.getLogger("jax_specdec.serve")
ENGINE_LOOK_SECONDS = 0.25
WORK_SECONDS = 10.0  # between two lines on the work
ERRORS_SECONDS = 10.0  # for the errors of a stopped engine to be read


class Work:
    """Lines such as "7 requests run and 2 wait; ended: 31; 412.0 tokens/s; acceptance 61.3 %"."""

    def __init__(self, engine: Engine, now: float) -> None:
        self._engine = engine
        self._next = now + WORK_SECONDS
        self._then, self._before, self._ended = now, Statistics(), 0

    def line(self, now: float) -> str:
        """The line that is due; empty where none is, or nothing was done since the last one."""
        if now < self._next:
            return ""
        status = self._engine.status
        statistics = sum((worker.statistics for worker in status), Statistics())
        ended = sum(sum(worker.processor.finished) for worker in status)
        running, waiting = (
            sum(len(worker.request_ids) for worker in status),
            self._engine.num_waiting,
        )
        tokens = statistics.num_tokens - self._before.num_tokens
        drafts = statistics.num_drafts - self._before.num_drafts
        accepted = statistics.num_accepted - self._before.num_accepted
        rate, over = tokens / (now - self._then), ended - self._ended
        self._next, self._then = now + WORK_SECONDS, now
        self._before, self._ended = statistics, ended
        if not (tokens or running or waiting or over):
            return ""
        runs = "runs" if running == 1 else "run"
        line = f"{pluralize(running, 'request')} {runs} and {waiting} wait; ended: {over}; "
        line += f"{rate:.1f} tokens/s"
        return line + (f"; acceptance {100 * accepted / drafts:.1f} %" if drafts else "")


@contextlib.contextmanager
def watched(
    engine: Engine,
    listener: Listener,
    clock: Callable[[], float] = time.monotonic,
    look_seconds: float = ENGINE_LOOK_SECONDS,
    kept_in: str = "",
) -> Iterator[None]:
    """Say in another thread what the engine does, until the block ends.

    Where the engine has stopped for good, the listener ends, once every client has been told so.
    """
    is_over = threading.Event()

    def watch() -> None:
        work = Work(engine, clock())
        failed: float | None = None
        ending = over = False
        with standard_output.waiting(standard_output.phases_of(engine), kept_in) as begun:
            while not over:
                over = is_over.wait(look_seconds)  # looks once more at the end
                now = clock()
                if engine.health().ready:
                    begun()
                if engine.failure is not None:
                    failed = now if failed is None else failed
                    listener.should_exit = True
                    listener.force_exit = listener.force_exit or now >= failed + ERRORS_SECONDS
                if listener.ending and not ending:
                    ending = True
                    logger.info("the server ends: open requests end first")
                if line := work.line(now):
                    logger.info(line)

    thread = threading.Thread(target=watch, name="what the server says", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
