"""Signals of the host program: handlers run, their exceptions arrive, the ring stays in order.

`.ci/heavy ring` repeats the storms for longer.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from ipc import RingClosed, RingReader, RingWriter
from tests.support import ring_storm
from tests.support.ring_storm import Interrupted

MODES = ["predict", "block", "spin"]


@pytest.fixture
def storm():
    with ring_storm.storm_of_signals() as storm:
        yield storm


@pytest.mark.parametrize("wait", MODES)
def test_reading_in_a_storm_of_raising_handlers(tmp_path, storm, wait):
    """No message is lost, repeated or damaged, wherever in receive() the handler raised."""
    ring_storm.read(storm, wait, tmp_path / "p", messages=500)


def test_rehearsing_in_a_storm_of_raising_handlers(tmp_path, storm):
    """An exception inside a rehearsal leaves receive(); no message is lost or held back."""
    ring_storm.rehearse(storm, tmp_path / "p", messages=30)


@pytest.mark.parametrize("wait", MODES)
def test_writing_in_a_storm_of_raising_handlers(tmp_path, storm, wait):
    """After an interrupted send(), the counters say whether the message was sent."""
    ring_storm.write(storm, wait, tmp_path / "p", messages=500)


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

def wait_for_the_other_side():
    print("waiting", flush=True)
    if side == "reader":
        reader.receive()
    else:
        writer.send(b"waits")

mode, side, threads = sys.argv[1:]
if threads == "threads":   # then the kernel may interrupt another thread
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
reader = RingReader.create(1, 64, wait=mode)
with reader, RingWriter.attach(reader.name, wait=mode) as writer:
    if side == "writer":
        writer.send(b"fills the ring")
    try:
        wait_for_the_other_side()
    except SystemExit as exit:
        print("exit", exit.code, flush=True)
    wait_for_the_other_side()
"""


@pytest.mark.parametrize("threads", ["threads", "alone"])
@pytest.mark.parametrize("side", ["reader", "writer"])
@pytest.mark.parametrize("wait", MODES)
def test_sigterm_and_ctrl_c_end_a_wait(wait, side, threads):
    """A handler's sys.exit is not swallowed, and Ctrl-C arrives as KeyboardInterrupt."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, wait, side, threads],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "exit 7\n"
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == -signal.SIGINT
        finally:
            process.kill()
        assert "KeyboardInterrupt" in process.stderr.read()
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
