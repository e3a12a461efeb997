"""Jobs in the background of a worker's steps: in a thread of its own, one at a time."""

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

NAME = "background"  # of the thread
SWITCH_SECONDS = 0.0005  # after which the job's thread gives way to the one that makes steps
LESS = 10  # priority of the job's thread and of the compiler's that it starts: steps come first
# A job that gives way goes on after so long at the latest, for at least so long: however little
# time steps leave, it ends.
LONGEST_WAIT, SHORTEST_TURN = 0.02, 0.002


class BackgroundJobs:
    """Jobs in a thread; as a context, one that still runs does not hold up the process's end.

    A job that traces and lowers a program shares the interpreter with the steps. Python would give
    either half of it, and a step of a few milliseconds would wait for many of the job's calls,
    some of which take 20 ms. So the job stops at the next call of a function while a step is made,
    and goes on while that one waits for the device. No collection of garbage stops both. Where the
    device is this machine, its compiler would take the cores of a step that is computed: it has a
    lower priority. What a job leaves is collected by
    `collect`, when nobody waits: a collection of it takes over 100 ms.

    Attributes:
      busy: a job runs, or has ended and was not taken.
      ended: a job has ended and was not taken.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        """Begin without a job; `on_end` is called in the job's thread when one has ended."""
        self._on_end = on_end
        self.busy = self.ended = False
        self._error: Exception | None = None
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._turn_ends = 0.0
        self._left_garbage = False

    def start(self, job: Callable[[], object], /) -> None:
        """Begin a job; none may be on its way."""
        assert not self.busy
        self.busy = True
        threading.Thread(target=self._run, args=(job,), name=NAME, daemon=True).start()

    def take(self) -> Exception | None:
        """The error that the job ended with, if any; the next one may begin."""
        assert self.ended
        error, self._error = self._error, None
        self.busy = self.ended = False
        return error

    def collect(self) -> bool:
        """Collect the garbage that jobs have left; whether there was a job since the last time."""
        if self.busy or not self._left_garbage:
            return False
        self._left_garbage = False
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return True

    @contextlib.contextmanager
    def giving_way(self, now: bool, /) -> Iterator[None]:
        """Whether a job leaves the interpreter to the caller in this block."""
        before = self._goes_on.is_set()
        self._let(not now)
        try:
            yield
        finally:
            self._let(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self.busy or self.ended:
            return
        # A compiler cannot be told to stop, and its threads do not outlive the interpreter.
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if error is None else 1)

    def _let(self, go_on: bool) -> None:
        if go_on:
            self._goes_on.set()
        else:
            self._goes_on.clear()

    def _called(self, frame: object, event: str, argument: object) -> None:
        """Give way, at a call of the job's or a return from one."""
        if not self._goes_on.is_set() and time.perf_counter() >= self._turn_ends:
            self._goes_on.wait(LONGEST_WAIT)
            self._turn_ends = time.perf_counter() + SHORTEST_TURN

    def _run(self, job: Callable[[], object]) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            thread = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread) + LESS
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.disable()
        sys.setprofile(self._called)  # of this thread alone
        try:
            job()
        except Exception as error:
            self._error = error
        finally:
            sys.setprofile(None)
            gc.freeze()  # no collection looks at it, until `collect`
            self._left_garbage = True
            gc.enable()
            sys.setswitchinterval(before)
        self.ended = True
        self._on_end()
