"""Transfers between two processes while the signal handlers of one of them raise all the time.

Each runs until enough messages have crossed and enough calls were interrupted, so that a busy
machine makes it longer and not weaker. The calls under test are written out where the handler is
armed: a helper that makes them would lose its result if a handler raised after it.
"""

import contextlib
import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from ipc import RingReader, RingWriter
from tests.support.ring_checks import assert_slots_are_accounted_for
from tests.support.ring_peer import Progress, is_intact, payload, start_peer

MAX_BYTES = 2000
ENOUGH_INTERRUPTIONS = 50
TOO_MANY_MESSAGES = 1_000_000  # by then the signals have stopped


class Interrupted(Exception):
    """The exception that the signal handler raises."""


class Storm:
    """A handler of SIGALRM that raises at every second signal while `armed`."""

    def __init__(self) -> None:
        self.armed = False
        self._fired = 0

    def handle(self, number: int, frame: object) -> None:
        self._fired += 1
        if self.armed and self._fired % 2:
            raise Interrupted


@contextlib.contextmanager
def storm_of_signals() -> Iterator[Storm]:
    """Delivers SIGALRM every 0.3 ms to this process; checks that no signal stays held back."""
    storm = Storm()
    # What a handler raises in a callback of the collector (jax has one) cannot reach the test.
    gc.disable()
    before = signal.signal(signal.SIGALRM, storm.handle)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    try:
        yield storm
    finally:
        storm.armed = False
        signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest-timeout's
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert signal.pthread_sigmask(signal.SIG_SETMASK, mask) == mask


def read(storm: Storm, wait: str, progress: Path, messages: int) -> None:
    """Reads at least `messages` messages; each must come whole, once and in order."""
    raised, received = 0, 0
    with RingReader.create(4, MAX_BYTES, wait=wait) as reader:
        peer = start_peer(
            "produce", reader.name, progress, wait=wait, max_bytes=MAX_BYTES, gap_us=100
        )
        reader.wait_attached(30)
        while received < messages or raised < ENOUGH_INTERRUPTIONS:
            try:
                storm.armed = True
                try:
                    message = reader.receive(30)
                finally:
                    storm.armed = False
            except Interrupted:
                raised += 1
                continue
            assert message.sequence == received
            assert is_intact(message.data, received, MAX_BYTES)
            received += 1
            assert received < TOO_MANY_MESSAGES, "too few calls were interrupted"
    assert peer.wait(30) == 0  # the closed ring ends it


def write(storm: Storm, wait: str, progress: Path, messages: int) -> None:
    """Sends at least `messages` messages; after an interruption the counters say what was sent."""
    raised = 0
    with RingWriter.create(4, MAX_BYTES, wait=wait) as writer:
        peer = start_peer(
            "consume", writer.name, progress, wait=wait, max_bytes=MAX_BYTES, gap_us=100
        )
        writer.wait_attached(30)
        while (number := writer.counters().messages) < messages or raised < ENOUGH_INTERRUPTIONS:
            parts = payload(number, MAX_BYTES)
            try:
                storm.armed = True
                try:
                    writer.send(*parts, timeout=30)
                finally:
                    storm.armed = False
            except Interrupted:
                raised += 1
            assert_slots_are_accounted_for(writer)
            assert number < TOO_MANY_MESSAGES, "too few calls were interrupted"
        writer.close()
        assert peer.wait(30) == 0
    record = Progress.at(progress)
    assert (record.done, record.damaged, record.finished) == (number, 0, True)


def rehearse(storm: Storm, progress: Path, messages: int) -> None:
    """Reads at least `messages` messages, until a rehearsal was interrupted, losing none."""
    interrupted, received, rehearsing = 0, 0, []

    def busy_rehearsal() -> None:
        rehearsing.append(1)
        until = monotonic() + 0.0005
        while monotonic() < until:
            pass
        rehearsing.clear()

    with RingReader.create(4, MAX_BYTES) as reader:
        reader._items._cores.look = lambda now: True  # there may be no free core here
        peer = start_peer(
            "produce", reader.name, progress, wait="predict", max_bytes=MAX_BYTES, gap_us=3000
        )
        reader.wait_attached(30)
        while received < messages or not interrupted:
            try:
                storm.armed = True
                try:
                    message = reader.receive(30, rehearse=busy_rehearsal)
                finally:
                    storm.armed = False
            except Interrupted:
                interrupted += bool(rehearsing)
                rehearsing.clear()
                continue
            assert message.sequence == received
            assert is_intact(message.data, received, MAX_BYTES)
            received += 1
            assert received < TOO_MANY_MESSAGES, "no rehearsal was interrupted"
    assert peer.wait(30) == 0
