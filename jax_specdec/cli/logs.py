"""Lines of the log on stderr; nobody waits for who reads them."""

import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORM = "%(asctime)s %(levelname)s %(message)s"
MAX_LINES = 10_000  # that may wait for who reads stderr; further ones are dropped, and counted
LAST_LINES_SECONDS = 2.0  # for the lines that wait at the end


def add_log_level(group: Any) -> None:
    """Add the option for how much is logged."""
    group.add_argument("--log-level", choices=LEVELS, default="info",
        help="of the log on stderr; debug has a line for every request (default: %(default)s)",
    )  # fmt: skip


class Lines(logging.Handler):
    """A handler that never waits: a thread writes.

    A terminal that is stopped, or a pipe that nobody reads, would otherwise stop whoever logs: the
    thread that serves all requests.
    """

    def __init__(
        self, stream: TextIO, max_lines: int = MAX_LINES, end_seconds: float = LAST_LINES_SECONDS
    ) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORM))
        self._stream = stream
        self.waiting: queue.Queue[str | None] = queue.Queue(max_lines)
        self.num_dropped, self._end_seconds = 0, end_seconds
        self.thread = threading.Thread(target=self._write, name="log", daemon=True)
        self.thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Let a line wait, or drop it."""
        try:
            self.waiting.put_nowait(self.format(record))
        except queue.Full:
            self.num_dropped += 1
        except Exception:  # what logging does with a line that cannot be made
            self.handleError(record)

    def close(self) -> None:
        """Write what waits, as long as somebody reads it."""
        with contextlib.suppress(queue.Full):
            self.waiting.put(None, timeout=self._end_seconds)
        self.thread.join(self._end_seconds)
        super().close()

    def _write(self) -> None:
        while (line := self.waiting.get()) is not None:
            dropped, self.num_dropped = self.num_dropped, 0
            if dropped:
                line += f"\n{dropped} lines of the log were dropped before that: nobody read them"
            with contextlib.suppress(OSError, ValueError):  # whoever would read it is gone
                self._stream.write(line + "\n")
                self._stream.flush()


@contextlib.contextmanager
def logged(level: str, stream: TextIO | None = None) -> Iterator[None]:
    """Log to stderr in the block: this package's lines from `level` on, others' warnings."""
    ours, root = logging.getLogger("jax_specdec"), logging.getLogger()
    handler = Lines(stream or sys.stderr)
    before = ours.level
    ours.setLevel(level.upper())
    # A library's logger may let less than a warning through, whatever the root's level is.
    handler.addFilter(lambda line: line.levelno >= logging.WARNING or ours.name in line.name)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(before)
        handler.close()
