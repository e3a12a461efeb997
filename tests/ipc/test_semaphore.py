"""Waits end by CLOCK_MONOTONIC, whatever the wall clock does, also where libc cannot do it."""

import os
import signal
from time import monotonic_ns

import pytest

from ipc import semaphore
from ipc.semaphore import Semaphore

MS = 1_000_000


@pytest.fixture(params=["sem_clockwait", "a libc without it"])
def made(request, monkeypatch):
    if request.param != "sem_clockwait":
        monkeypatch.setattr(semaphore, "sem_clockwait", None)
    made = Semaphore.create(f"/jax-specdec-test.{os.getpid()}.{monotonic_ns()}", 0)
    made.unlink()
    yield made
    made.close()
    made.close()


def waited(one, ns):
    """Waits for a unit; returns how many it took, and how much too early the wait ended, in ns."""
    until = monotonic_ns() + ns
    taken = len(list(one.waiting(until)))
    return taken, max(until - monotonic_ns(), 0)


def test_a_wait_ends_by_the_monotonic_clock(made):
    assert waited(made, 30 * MS) == (0, 0)
    made.release()
    taken, early = waited(made, 3_600_000 * MS)  # an hour: the unit ends it
    assert taken == 1
    assert early > 0
    assert waited(made, 0) == (0, 0)


def test_a_handler_of_a_signal_may_raise_and_takes_nothing(made):
    def raise_it(number, frame):
        raise ZeroDivisionError

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)  # the first may fall before the wait
        with pytest.raises(ZeroDivisionError):
            list(iter(lambda: list(made.waiting(monotonic_ns() + 20 * MS)), [0]))  # for ever
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    made.release()
    assert waited(made, 0)[0] == 1
