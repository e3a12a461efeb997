"""A job beside a worker's steps: it runs in a thread of its own, one at a time."""

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

NAME = "beside"  # of the thread
SWITCH_SECONDS = 0.0005  # after which the job's thread gives way to the one that makes steps


class Jobs(Protocol):
    """Runs jobs: a thread, or a test's own."""

    @property
    def busy(self) -> bool:
        """Whether a job runs, or has ended and was not taken."""

    @property
    def ended(self) -> bool:
        """Whether a job has ended and was not taken."""

    def start(self, job: Callable[[], None], /) -> None:
        """Begin a job; none may be on its way."""

    def take(self) -> Exception | None:
        """The error that the job ended with, if any; the next one may begin."""


class Beside:
    """Jobs in a thread; as a context, one that still runs does not hold up the process's end.

    A job that traces and lowers a program shares the interpreter with the steps: it gives way
    often, and no collection of garbage stops both.
    """

    def __init__(self, told: Callable[[], None]) -> None:
        """Begin without a job; `told` is called in the job's thread when one has ended."""
        self._told = told
        self._busy = self._ended = False
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def ended(self) -> bool:
        return self._ended

    def start(self, job: Callable[[], None], /) -> None:
        assert not self._busy
        self._busy = True
        threading.Thread(target=self._run, args=(job,), name=NAME, daemon=True).start()

    def take(self) -> Exception | None:
        assert self._ended
        error, self._error = self._error, None
        self._busy = self._ended = False
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self._busy or self._ended:
            return
        # A compiler cannot be told to stop, and its threads do not outlive the interpreter.
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if error is None else 1)

    def _run(self, job: Callable[[], None]) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.disable()
        try:
            job()
        except Exception as error:
            self._error = error
        finally:
            gc.enable()
            sys.setswitchinterval(before)
        self._ended = True
        self._told()
