"""A worker's process: how it is started, ended and reported, with programs in place of workers."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from ipc import RingReader, RingWriter
from ipc.wire import Kind
from jax_specdec.engine import engine as engine_module
from jax_specdec.engine import worker_client
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.encode import encode
from tests.support.processes import is_alive, no_ring_is_left, wait_for
from tests.support.scene import long_requests
from tests.support.scripted_worker import VOCAB


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    yield
    wait_for(no_ring_is_left)


def fake_worker(code):
    """A worker program that runs `code` after it has read its first command as `start`."""
    head = "import json, os, sys, time\nstart = json.loads(sys.stdin.readline())\n"
    attach = "from ipc import RingWriter\nring = RingWriter.attach(start['ring'])\n"
    return (sys.executable, "-c", head + attach + code)


def failure_of(code, requests=None, on_worker_loss="stop"):
    """The report of an engine whose worker runs `code`, and its requests' finish reasons."""
    settings = EngineConfig(
        vocab_size=VOCAB, num_slots=3, max_length=96, on_worker_loss=on_worker_loss
    )
    reasons = []

    def collect(engine):
        for update in engine.generate(requests or long_requests(2)):
            reasons.extend(record.finish_reason for record in update.records)

    start = functools.partial(worker_client.WorkerProcess, program=fake_worker(code))
    with Engine(settings, start_worker=start) as engine:
        with pytest.raises(WorkerFailed) as error:
            collect(engine)
        return str(error.value), reasons


def test_what_a_worker_prints_last_is_shown_whatever_its_bytes_are():
    text, reasons = failure_of(
        r"os.write(2, b'x' * 100_000 + b'\n' + b'caf\xe9 is broken\n'); os._exit(3)"
    )
    assert "status 3" in text
    assert r"caf\xe9 is broken" in text
    assert reasons == [FinishReason.WORKER_LOST] * 2


@pytest.mark.fast
@pytest.mark.parametrize(
    ("code", "how", "memory", "restart"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by signal 9 (Killed)", True, True),
        ("os.kill(os.getpid(), 11)", "was killed by signal 11 (Segmentation fault)", False, True),
        ("os.kill(os.getpid(), 40)", "was killed by signal 40 (", False, True),
        ("os._exit(3)", "exited with status 3", False, False),
        ("os._exit(137)", "another process of its group was killed by signal 9 (", True, True),
        ("os._exit(128)", "exited with status 128", False, False),
        ("os._exit(255)", "exited with status 255", False, False),
        ("ring.close(); os._exit(0)", "exited with status 0", False, False),
    ],
)
def test_the_report_of_a_lost_worker_helps_a_user_who_never_saw_a_ring(code, how, memory, restart):
    text, _ = failure_of(code)
    assert f"{how}" in text
    assert "after 0 messages, before its requests were done\n" in text
    assert ("memory runs out" in text) == memory
    assert ('on_worker_loss="restart"' in text) == restart
    assert not re.search(r"\brings?\b|producer", text)
    text, _ = failure_of(code, on_worker_loss="continue")  # its user knows the choices
    assert how in text
    assert 'on_worker_loss="restart"' not in text


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ring.send(b'garbage!'); time.sleep(99)", "whole 32-bit words and at least 8"),
        ("ring.send(bytes(64)); time.sleep(99)", "magic"),
        (
            "ring.close(); time.sleep(99)",
            "had to be ended after 0 messages, before its requests "
            "were done: the producer closed the ring",
        ),
        (
            "from jax_specdec.records.encode import encode\n"
            "ring.send(encode(3, 7, [])); time.sleep(99)",
            "7",
        ),
    ],
)
def test_a_message_that_cannot_be_closes_the_requests(code, said, monkeypatch):
    monkeypatch.setattr(worker_client, "PATIENCE_SECONDS", 0.2)
    text, reasons = failure_of(code)
    assert said in text
    assert reasons == [FinishReason.WORKER_LOST] * 2


def test_an_interrupt_while_a_worker_is_started_leaves_nothing(monkeypatch):
    started = []

    def interrupted_tell(self, command):
        started.append(self.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_client.WorkerProcess, "tell", interrupted_tell)
    with pytest.raises(KeyboardInterrupt):
        Engine(EngineConfig(vocab_size=VOCAB, num_ranks=2))
    assert len(started) == 1
    assert not is_alive(started[0])


@pytest.mark.parametrize("owner", [RingReader, threading.Thread])
def test_a_worker_that_cannot_be_watched_or_heard_is_ended_with_the_reason(owner, monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    def refuse(*_):
        raise RuntimeError("too many of them")

    monkeypatch.setattr(worker_client.subprocess, "Popen", Popen)
    monkeypatch.setattr(owner, "expect_peer" if owner is RingReader else "start", refuse)
    with pytest.raises(RuntimeError, match="too many of them"):
        worker_client.WorkerProcess(
            EngineConfig(vocab_size=VOCAB), program=fake_worker("time.sleep(99)")
        )
    assert [process.poll() for process in started] == [-signal.SIGTERM]
    assert all(pipe.closed for process in started for pipe in (process.stdin, process.stderr))


def test_closing_does_not_wait_for_a_worker_that_reads_nothing(monkeypatch):
    monkeypatch.setattr(worker_client, "PATIENCE_SECONDS", 0.2)
    worker = worker_client.WorkerProcess(
        EngineConfig(vocab_size=VOCAB), program=fake_worker("time.sleep(99)")
    )
    worker.ring.wait_attached(60)
    os.kill(worker.pid, signal.SIGSTOP)
    pipe = worker._process.stdin.fileno()
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):  # until it is full: a write would block for good
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)
    assert worker.stop(drain=False) in (-signal.SIGTERM, -signal.SIGKILL)


def test_only_rings_with_a_message_are_read_when_there_are_several():
    def rank(number):
        ring = RingReader.create(4, 64, doorbell=True)
        worker = SimpleNamespace(ring=ring)
        return WorkerSession(worker, num_slots=1, max_length=9, process_rank=number)

    quiet, busy = rank(0), rank(1)
    with (
        quiet.worker.ring,
        busy.worker.ring,
        RingWriter.attach(busy.worker.ring.name) as writer,
    ):
        writer.send(encode(Kind.TARGET, 0, [], process_rank=1))
        assert engine_module._wait([quiet, busy]) == [busy]
        assert busy.receive(0).message.step == 0
        assert quiet.receive(0) is None
