"""A ring's semaphores: posix_ipc's, with a wait whose deadline is of CLOCK_MONOTONIC.

posix_ipc waits with sem_timedwait(3), whose deadline is of CLOCK_REALTIME: a wall clock that is set
back by x lengthens the wait by x. sem_clockwait (glibc 2.30, 2019) takes the clock to wait on.
posix_ipc does not know it, so ctypes calls it, on a second handle of the same semaphore. A libc
that lacks it (an older glibc, musl) has no sound wait at all: there a waiter sleeps for POLL_NS
and looks again, which costs a few percent of a core and up to POLL_NS of latency.
"""

import ctypes
import os
from collections.abc import Callable, Iterable
from itertools import filterfalse
from time import monotonic_ns, sleep
from typing import Self

import posix_ipc

POLL_NS = 500_000  # between two looks, where libc lacks sem_clockwait

_CLOCK_MONOTONIC = 1
_NOW = (0,)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_sem_open = _libc.sem_open
_sem_open.argtypes, _sem_open.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
_sem_close = _libc.sem_close
_sem_close.argtypes = (ctypes.c_void_p,)
sem_clockwait: Callable[..., int] | None = getattr(_libc, "sem_clockwait", None)
if sem_clockwait is not None:
    sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))  # type: ignore[attr-defined]


class Semaphore(posix_ipc.Semaphore):
    """A named semaphore of a ring, open in this process until `close`."""

    _address: int | None = None
    _closed = False

    @classmethod
    def create(cls, name: str, value: int) -> Self:
        """Makes a new semaphore of mode 0600. Raises what posix_ipc raises, and OSError."""
        return cls(name, posix_ipc.O_CREX, mode=0o600, initial_value=value)._with_clock()

    @classmethod
    def open(cls, name: str) -> Self:
        """Opens one that exists. Raises what posix_ipc raises, and OSError."""
        return cls(name, flags=0)._with_clock()

    def _with_clock(self) -> Self:
        if sem_clockwait is not None:
            self._address = _sem_open(self.name.encode(), 0)
            if self._address is None:  # SEM_FAILED
                number = ctypes.get_errno()
                self.close()
                raise OSError(number, os.strerror(number))
            self._until = _Timespec()
            self._arguments = (self._address,), (_CLOCK_MONOTONIC,), (self._until,)
        return self

    def waiting(self, until_ns: int) -> Iterable[object]:
        """Returns an iterator that waits for a unit, and yields once if it took one.

        Nothing waits before it is iterated over. A signal may end the wait early. C code alone runs
        from the taking of the unit to the yielding, so that no signal handler's exception comes
        between the two.

        Args:
          until_ns: time of CLOCK_MONOTONIC in ns.
        """
        if self._address is None:
            while not self.value:
                remaining_ns = until_ns - monotonic_ns()
                if remaining_ns <= 0:
                    return ()
                sleep(min(remaining_ns, POLL_NS) * 1e-9)
            return map(self.acquire, _NOW)
        self._until.seconds, self._until.nanoseconds = divmod(until_ns, 1_000_000_000)
        assert sem_clockwait is not None
        return filterfalse(None, map(sem_clockwait, *self._arguments))  # it returns 0 or -1

    def close(self) -> None:
        """Closes this process's handles. Calling it again does nothing."""
        address, self._address = self._address, None
        if address is not None:
            _sem_close(address)
        if not self._closed:
            self._closed = True
            super().close()
