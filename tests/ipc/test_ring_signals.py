"""Signals of the host program: handlers run, their exceptions arrive, the ring stays in order.

Transfers cross between two processes while the signal handlers of one of them raise all the time.
Each runs until enough messages have crossed and enough calls were interrupted, so that a busy
machine makes it longer and not weaker. The calls under test are written out where the handler is
armed: a helper that makes them would lose its result if a handler raised after it.
"""

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from ipc import RingClosed, RingReader, RingWriter
from tests.support.ring_checks import assert_slots_are_accounted_for
from tests.support.ring_peer import is_intact, payload, record, start_peer

MODES = ["predict", "block", "spin"]
MAX_BYTES = 2000
ENOUGH_INTERRUPTIONS = 50
TOO_MANY_MESSAGES = 1_000_000  # by then the signals have stopped


class Interrupted(Exception):
    """The exception that the signal handler raises."""


@pytest.fixture
def storm():
    """Delivers SIGALRM every 0.3 ms to this process, where every second one raises while `armed`.

    Checks that no signal stays held back.
    """
    storm, seconds = SimpleNamespace(armed=False), itertools.cycle((True, False))

    def handle(number, frame):
        if next(seconds) and storm.armed:
            raise Interrupted

    # What a handler raises in a callback of the collector (jax has one) cannot reach the test.
    gc.disable()
    before = signal.signal(signal.SIGALRM, handle)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    yield storm
    storm.armed = False
    signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest-timeout's
    signal.signal(signal.SIGALRM, before)
    gc.enable()
    assert signal.pthread_sigmask(signal.SIG_SETMASK, mask) == mask


often = pytest.mark.parametrize("messages", [500, pytest.param(10_000, marks=pytest.mark.slow)])


@often
@pytest.mark.parametrize("wait", MODES)
def test_reading_in_a_storm_of_raising_handlers(tmp_path, storm, wait, messages):
    """No message is lost, repeated or damaged, wherever in receive() the handler raised."""
    raised = received = 0
    with RingReader.create(4, MAX_BYTES, wait=wait) as reader:
        peer = start_peer(
            "produce", reader.name, tmp_path / "p", wait=wait, max_bytes=MAX_BYTES, gap_us=100
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


@often
@pytest.mark.parametrize("wait", MODES)
def test_writing_in_a_storm_of_raising_handlers(tmp_path, storm, wait, messages):
    """After an interrupted send(), the counters say whether the message was sent."""
    raised = 0
    with RingWriter.create(4, MAX_BYTES, wait=wait) as writer:
        peer = start_peer(
            "consume", writer.name, tmp_path / "p", wait=wait, max_bytes=MAX_BYTES, gap_us=100
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
    assert [*record(tmp_path / "p")] == [number, 0, 1]


@pytest.mark.parametrize("num_slots", [1, 3])
def test_nothing_is_sent_after_an_interrupted_close(monkeypatch, num_slots):
    """The end of stream has no slot: a later message would overwrite one that waits."""

    def interrupt(name):
        raise Interrupted

    with RingReader.create(num_slots, 8) as reader, RingWriter.attach(reader.name) as writer:
        sent = [bytes([number]) * 8 for number in range(num_slots)]
        for data in sent:
            writer.send(data)
        with monkeypatch.context() as patch:
            # The call that follows the end of stream in close().
            patch.setattr("ipc.endpoint.unlink_names", interrupt)
            with pytest.raises(Interrupted):
                writer.close()
        with pytest.raises(RingClosed, match="has ended the stream"):
            writer.send(b"too late", timeout=0)
        writer.close()
        assert [message.data for message in reader] == sent


WAITING = """
import signal, sys, threading, time
from ipc import RingReader, RingWriter

mode, side, threads = sys.argv[1:]
if threads == "threads":   # then the kernel may interrupt another thread
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
reader = RingReader.create(1, 64, wait=mode)
with reader, RingWriter.attach(reader.name, wait=mode) as writer:
    call = reader.receive
    if side == "writer":
        call = lambda: writer.send(b"fills the ring")
        call()
    for _ in range(2):
        print("waiting", flush=True)
        try:
            call()
        except SystemExit as exit:
            print("exit", exit.code, flush=True)
"""


@pytest.mark.parametrize("threads", ["threads", "alone"])
@pytest.mark.parametrize("side", ["reader", "writer"])
@pytest.mark.parametrize("wait", MODES)
def test_sigterm_and_ctrl_c_end_a_wait(wait, side, threads):
    """A handler's sys.exit is not swallowed, and Ctrl-C arrives as KeyboardInterrupt."""
    command = [sys.executable, "-c", WAITING, wait, side, threads]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                assert process.stdout.readline() == "waiting\n"
                time.sleep(0.02)
                process.send_signal(number)
                assert process.stdout.readline() == ("exit 7\n" if number == 15 else "")
            assert process.wait(10) == -signal.SIGINT
        finally:
            process.kill()
        assert "KeyboardInterrupt" in process.stderr.read()
    assert not [name for name in os.listdir("/dev/shm") if f".{process.pid}." in name]
