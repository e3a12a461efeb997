"""Work in Python that ends after some seconds, for programs that others wrote.

The thread that works gets an exception from another one, which the interpreter raises between two
of its instructions. So it ends loops of Python, and not one call of a function in C.

Source: https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc
"""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class OutOfTime(Exception):
    """Work has taken longer than it may."""


def run_within(seconds: float, work: Callable[[], _T]) -> _T:
    """Run `work` and return its result.

    Raises:
      OutOfTime: it has not come to its end in so many seconds.
    """
    try:
        return _watched(seconds, work)
    except OutOfTime:
        raise OutOfTime(f"it takes longer than {seconds:g} seconds") from None


def _watched(seconds: float, work: Callable[[], _T]) -> _T:
    worker, lock, over = threading.get_ident(), threading.Lock(), threading.Event()

    def interrupt() -> None:
        with lock:
            if not over.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(worker), ctypes.py_object(OutOfTime)
                )

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        return work()
    finally:
        with lock:
            over.set()
        timer.cancel()  # an interrupt that came just before is raised here, and not in the caller
