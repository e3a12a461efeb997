"""Signals of the host program: handlers run, what they raise arrives, the ring stays in order."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ipc.errors import RingClosed
from ipc.ring import RingReader, RingWriter
from tests.ipc.test_ring_model import assert_slots_are_accounted_for
from tests.support.ring_peer import Progress, is_intact, payload, start_peer

MODES = ["predict", "block", "spin"]
MAX_BYTES = 2000


class Interrupted(Exception):
    """What the test's signal handler raises."""


@pytest.fixture
def storm():
    """Delivers SIGALRM every 0.3 ms to this process; the handler raises every second time."""
    fired = [0]

    def handler(number: int, frame: object) -> None:
        fired[0] += 1
        if armed[0] and fired[0] % 2:
            raise Interrupted

    armed = [False]
    before = signal.signal(signal.SIGALRM, handler)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    yield armed, fired
    armed[0] = False
    signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest-timeout's
    signal.signal(signal.SIGALRM, before)
    assert signal.pthread_sigmask(signal.SIG_SETMASK, mask) == mask  # nothing stayed held back


@pytest.mark.parametrize("wait", MODES)
def test_reading_in_a_storm_of_raising_handlers(tmp_path, storm, wait):
    """No message is lost, repeated or damaged, wherever in receive() the handler raised."""
    armed, fired = storm
    count, raised, received = 3000, 0, []
    with RingReader.create(4, MAX_BYTES, wait=wait) as reader:
        peer = start_peer(
            "produce", reader.name, tmp_path / "p",
            wait=wait, count=count, max_bytes=MAX_BYTES, gap_us=100,
        )  # fmt: skip
        reader.wait_attached(30)
        while len(received) < count:
            try:
                armed[0] = True
                try:
                    message = reader.receive(30)
                finally:
                    armed[0] = False
            except Interrupted:
                raised += 1
                continue
            received.append(message.sequence)
            assert is_intact(message.data, message.sequence, MAX_BYTES)
        assert peer.wait(30) == 0
    assert received == list(range(count))
    assert raised > 50, f"only {raised} of {fired[0]} signals raised: the test was idle"


def test_rehearsing_in_a_storm_of_raising_handlers(tmp_path, storm):
    """What is raised inside a rehearsal leaves receive(); no message is lost, nor held back."""
    armed, _ = storm
    count, inside, received, rehearsing = 200, 0, [], []

    def rehearse():
        rehearsing.append(1)
        until = time.monotonic() + 0.0005
        while time.monotonic() < until:
            pass
        rehearsing.clear()

    with RingReader.create(4, MAX_BYTES) as reader:
        peer = start_peer(
            "produce", reader.name, tmp_path / "p",
            wait="predict", count=count, max_bytes=MAX_BYTES, gap_us=3000,
        )  # fmt: skip
        reader.wait_attached(30)
        while len(received) < count:
            try:
                armed[0] = True
                try:
                    message = reader.receive(30, rehearse=rehearse)
                finally:
                    armed[0] = False
            except Interrupted:
                inside += bool(rehearsing)
                rehearsing.clear()
                continue
            received.append(message.sequence)
            assert is_intact(message.data, message.sequence, MAX_BYTES)
        assert peer.wait(30) == 0
    assert received == list(range(count))
    assert inside, "no rehearsal was interrupted: the test was idle"


@pytest.mark.parametrize("wait", MODES)
def test_writing_in_a_storm_of_raising_handlers(tmp_path, storm, wait):
    """After an interrupted send(), the counters say whether the message was sent."""
    armed, fired = storm
    count, raised = 3000, 0
    with RingWriter.create(4, MAX_BYTES, wait=wait) as writer:
        peer = start_peer(
            "consume", writer.name, tmp_path / "p", wait=wait, max_bytes=MAX_BYTES, gap_us=100
        )
        writer.wait_attached(30)
        while (number := writer.counters().messages) < count:
            parts = payload(number, MAX_BYTES)
            try:
                armed[0] = True
                try:
                    writer.send(*parts, timeout=30)
                finally:
                    armed[0] = False
            except Interrupted:
                raised += 1
            assert_slots_are_accounted_for(writer)
        writer.close()
        assert peer.wait(30) == 0
    progress = Progress.at(tmp_path / "p")
    assert (progress.done, progress.damaged, progress.finished) == (count, 0, True)
    assert raised > 50, f"only {raised} of {fired[0]} signals raised: the test was idle"


@pytest.mark.parametrize("num_slots", [1, 3])
def test_nothing_is_sent_after_an_interrupted_close(monkeypatch, num_slots):
    """The end of stream has no slot: a message behind it would overwrite one that waits."""

    def interrupt(name):
        raise Interrupted

    with RingReader.create(num_slots, 8) as reader, RingWriter.attach(reader.name) as writer:
        sent = [bytes([number]) * 8 for number in range(num_slots)]
        for data in sent:
            writer.send(data)
        with monkeypatch.context() as patch:
            patch.setattr(
                "ipc.endpoint.unlink_names", interrupt
            )  # the call after the end of stream
            with pytest.raises(Interrupted):
                writer.close()
        with pytest.raises(RingClosed, match="has ended the stream"):
            writer.send(b"too late", timeout=0)
        writer.close()
        assert [message.data for message in reader] == sent


WAITING = """
import signal, sys, threading, time
from ipc.ring import RingReader, RingWriter

mode, side, threads = sys.argv[1:]
if threads == "threads":   # then another thread may be the one that the kernel interrupts
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
reader = RingReader.create(1, 64, wait=mode)
with reader, RingWriter.attach(reader.name, wait=mode) as writer:
    if side == "reader":
        print("waiting", flush=True)
        reader.receive()
    else:
        writer.send(b"fills the ring")
        print("waiting", flush=True)
        writer.send(b"waits")
"""


@pytest.mark.parametrize("threads", ["threads", "alone"])
@pytest.mark.parametrize("side", ["reader", "writer"])
@pytest.mark.parametrize("wait", MODES)
def test_sigterm_and_ctrl_c_end_a_waiting_process(wait, side, threads):
    """A handler's sys.exit is not swallowed; Ctrl-C arrives as KeyboardInterrupt."""
    for number, status, said in (
        (signal.SIGTERM, 7, ""),
        (signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
    ):
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING, wait, side, threads],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.05)
            process.send_signal(number)
            try:
                assert process.wait(10) == status
            finally:
                process.kill()
            assert said in process.stderr.read()
    assert not [name for name in os.listdir("/dev/shm") if f".{process.pid}." in name]


def test_default_actions_still_work_while_waiting():
    """A signal without a handler kills as ever, within one slice."""
    script = WAITING.replace("signal.signal(signal.SIGTERM", "(lambda *a: 0)(signal.SIGTERM")
    process = subprocess.Popen(
        [sys.executable, "-c", script, "block", "reader", "alone"], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"waiting\n"
        process.terminate()
        try:
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.kill()
