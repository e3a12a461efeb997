"""What workers do until the first token comes, for a person who waits: a line, and for how long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_specdec.engine.engine import Engine

LOOK_SECONDS = 0.25

Phases = Callable[[], Sequence[str]]


def phases_of(engine: Engine) -> Phases:
    """What each process of the engine's workers does."""
    return lambda: [text for worker in engine.status for text in worker.phase]


class Starting:
    """A line such as "compiling 7 of 9 (step), 12 s"."""

    def __init__(self, phases: Phases, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count.

        Args:
          phases: what each process does now, in the words of `WorkerStatus.phase`.
          clock: returns seconds.
        """
        self._phases, self._clock = phases, clock
        self._since: dict[str, float] = {}

    def line(self) -> str:
        """What is done now, each thing once, and for how many seconds already."""
        now, doing = self._clock(), dict.fromkeys(self._phases())
        self._since = {what: self._since.get(what, now) for what in doing}
        return "; ".join(f"{what}, {now - since:.0f} s" for what, since in self._since.items())


@contextlib.contextmanager
def repeated(
    show: Callable[[], object], seconds: float = LOOK_SECONDS
) -> Iterator[Callable[[], None]]:
    """Call `show` every so many seconds in another thread, until the block ends.

    Yields a function that ends it earlier: afterwards `show` is not called again. It may be called
    several times.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            show()

    def end() -> None:
        if not over.is_set():
            over.set()
            thread.join()

    thread = threading.Thread(target=run, name="what workers do", daemon=True)
    thread.start()
    try:
        yield end
    finally:
        end()
