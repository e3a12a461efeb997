"""A worker's process: how it is started, ended and reported, with programs in place of workers."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from ipc import RingReader, RingWriter
from ipc.wire import Kind
from jax_specdec.engine import child_process, worker_client
from jax_specdec.engine.child_process import ChildProcess
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.encode import encode
from tests.support import scripted_process
from tests.support.processes import is_alive, wait_for
from tests.support.scene import long_requests, parts_of
from tests.support.scripted_process import settings
from tests.support.scripted_worker import VOCAB, ScriptedWorker


def started(program):
    return functools.partial(worker_client.WorkerProcess, program=program)


def fake_worker(code):
    """A worker program that runs `code` after it has read how it starts as `start`."""
    head = "import json, os, sys, time\nstart = json.loads(sys.stdin.readline())\n"
    attach = "from ipc import RingWriter\nring = RingWriter.attach(start['ring'])\n"
    return (sys.executable, "-c", head + attach + code)


def failure_of(code, **options):
    """The report of an engine whose worker runs `code`; all its requests have their last record."""
    reasons = []

    def collect(engine):
        for update in engine.generate(long_requests(2)):
            reasons.extend(record.finish_reason for record in update.records)

    with Engine(settings(**options), start_worker=started(fake_worker(code))) as engine:
        with pytest.raises(WorkerFailed) as error:
            collect(engine)
        assert reasons == [FinishReason.WORKER_LOST] * 2
        assert error.value.__cause__ is not None  # the ring's own error: a traceback shows it too
        return str(error.value)


@pytest.mark.parametrize(("on_worker_loss", "num_lost"), [("stop", 2), ("continue", 3)])
def test_workers_that_are_lost_at_once_are_all_named(on_worker_loss, num_lost, tmp_path):
    """Each with its own reason and file; a worker that lives is not among them under "stop"."""
    code = f"""
rank = start['process_rank']
print('rank', rank, 'speaks', flush=True)
time.sleep(60 * (rank >= {num_lost}))
os._exit(3 + rank)
"""
    config = settings(num_ranks=3, on_worker_loss=on_worker_loss, output_folder=str(tmp_path))
    with Engine(config, start_worker=started(fake_worker(code))) as engine:
        wait_for(lambda: all(one.worker.exit_status for one in engine.sessions[:num_lost]))
        with pytest.raises(WorkerFailed) as error:
            list(engine.generate(long_requests(2)))
    text = str(error.value)
    assert text.startswith(f"{num_lost} workers are lost:")
    assert len(error.value.failures) == num_lost
    for rank in range(3):
        is_lost = rank < num_lost
        assert (f"exited with status {3 + rank} " in text) == is_lost
        assert (f"rank {rank} speaks" in text) == is_lost
        assert (str(tmp_path / f"worker-{rank}-1.log") in text) == is_lost


@pytest.mark.parametrize(
    ("code", "how", "memory", "restart"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by signal 9 (Killed)", True, True),
        ("os.kill(os.getpid(), 11)", "was killed by signal 11 (Segmentation fault)", False, True),
        ("os.kill(os.getpid(), 40)", "was killed by signal 40 (", False, True),
        ("os._exit(137)", "another process of its group was killed by signal 9 (", True, True),
        ("os._exit(128)", "exited with status 128", False, False),
        ("os._exit(255)", "exited with status 255", False, False),
        ("ring.close(); os._exit(0)", "exited with status 0", False, False),
    ],
)
def test_a_lost_workers_report_says_it_without_rings(code, how, memory, restart):
    text = failure_of(code)
    assert how in text
    assert "after 0 messages, before its requests were done\n" in text
    assert ("memory runs out" in text) == memory
    assert ('on_worker_loss="restart"' in text) == restart
    assert not re.search(r"\brings?\b|producer", text)
    if restart:
        text = failure_of(code, on_worker_loss="continue")  # its user knows the choices
        assert how in text
        assert 'on_worker_loss="restart"' not in text


FLIP = """
message = bytes(70_000)
post = ring._post_items
def flip_then_post():
    ring._slots[ring._slot_of[0]][60_000] ^= 1
    post()
ring._post_items = flip_then_post
ring.send(message)
"""
OF_STEP_7 = "from jax_specdec.records.encode import encode\nring.send(encode(3, 7, []))\n"


@pytest.mark.parametrize(
    ("code", "options", "said"),
    [
        ("ring.send(b'garbage!')\n", {}, "whole 32-bit words and at least 9"),
        ("ring.send(bytes(64))\n", {}, "magic"),
        (OF_STEP_7, {}, "7"),
        ("ring.close()\n", {}, "had to be ended after 0 messages, before its requests "
         "were done: the producer closed the ring"),
        # A bit that flips in a large message.
        (FLIP, {}, "the payload of message 0 has a wrong checksum (bytes in it: 70000)"),
        (FLIP, {"checksum": False}, "magic 0"),  # the ring delivers it: the decoder looks at it
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_closes_the_requests(code, options, said, monkeypatch):
    monkeypatch.setattr(worker_client, "WORKER_STOP_SECONDS", 0.2)
    assert said in failure_of(code + "time.sleep(99)", prefill_chunk=4096, **options)


def test_an_error_names_the_file_of_a_lost_workers_output(tmp_path):
    code = r"os.write(2, b'line\n' * 200 + b'x' * 100_000 + b'\ncaf\xe9 is broken\n'); os._exit(3)"
    text = failure_of(code, output_folder=str(tmp_path))
    assert r"caf\xe9 is broken" in text  # whatever its bytes are
    path = tmp_path / "worker-0-1.log"
    assert str(path) in text
    printed, _, reason = path.read_bytes().rstrip(b"\n").rpartition(b"\n\n")
    assert printed == b"line\n" * 200 + b"x" * 100_000 + b"\ncaf\xe9 is broken"
    when, _, said = reason.decode().partition(" lost: ")
    assert datetime.now(UTC) - datetime.fromisoformat(when) < timedelta(minutes=10)
    assert said.startswith("the model worker of process rank 0 (pid ")
    last = r"it printed last: caf\xe9 is broken"
    assert said.endswith(f" exited with status 3 after 0 messages; {last}")
    text = failure_of("os.write(2, b'by default'); os._exit(3)")
    path = Path(re.search(r"all of them: (\S+)\)", text)[1])
    assert path.read_text().startswith("by default\n")
    assert sorted(os.listdir(path.parent)) == ["engine", path.name]  # and whose it is
    shutil.rmtree(path.parent)


def test_output_before_readiness_is_no_reason_of_the_end(tmp_path):
    """Libraries print what they like while they are imported."""

    def start(config, **options):
        made = worker_client.WorkerProcess(config, program=scripted_process.WORKER, **options)
        made._output.write_text("Traceback of a library\n")
        return made

    with Engine(settings(), start_worker=start) as engine:
        engine.serve()
        wait_for(lambda: engine.health().ready)
        os.kill(engine.status[0].pid, signal.SIGKILL)
        wait_for(lambda: engine.failure is not None)
        assert isinstance(engine.failure, WorkerFailed)
        assert "Traceback" not in engine.failure.report
        assert "it printed nothing once it took requests" in engine.failure.report
        assert "after 0 messages, while it had no requests\n" in engine.failure.report
        assert engine.failure.reason.endswith("was killed by signal 9 (Killed) after 0 messages")


def test_an_interrupt_while_a_worker_is_started_leaves_nothing(monkeypatch):
    started = []

    def interrupted_write(self, line):
        started.append(self.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildProcess, "write", interrupted_write)
    with pytest.raises(KeyboardInterrupt):
        Engine(EngineConfig(vocab_size=VOCAB, num_ranks=2))
    assert len(started) == 1
    assert not is_alive(started[0])


@pytest.mark.parametrize("fault", ["watch", "thread"])
def test_a_worker_that_cannot_be_watched_is_ended(fault, monkeypatch):
    started, popen = [], subprocess.Popen

    def noted(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(child_process.subprocess, "Popen", noted)
    thread = child_process.threading.Thread
    refused = (RingReader, "expect_peer") if fault == "watch" else (thread, "start")
    monkeypatch.setattr(*refused, mock.Mock(side_effect=RuntimeError("too many of them")))
    with pytest.raises(RuntimeError, match="too many of them"):
        worker_client.WorkerProcess(settings(), program=fake_worker("time.sleep(99)"))
    assert len(started) == (fault == "watch")
    for process in started:
        wait_for(lambda process=process: process.returncode == -signal.SIGKILL)
        assert process.stdin.closed


def test_a_stopped_worker_is_found_while_another_one_goes_on():
    """The engine's only thread waits for no worker: not to tell it, and not to end it."""
    config = settings(max_length=4096, num_ranks=2, on_worker_loss="continue",
                      heartbeat_timeout=2.0, resume_lost=True)  # fmt: skip
    prompt = (1,) * 4000
    requests = [replace(one, prompt_token_ids=prompt) for one in long_requests(40)]
    reasons, losses = {}, []
    with Engine(config, start_worker=started(scripted_process.WORKER)) as engine:
        engine.serve()
        wait_for(lambda: all(one.worker.heartbeat.ready for one in engine.sessions))
        os.kill(engine.sessions[0].worker.pid, signal.SIGSTOP)
        for update in engine.generate(requests):
            losses += [str(update.lost)] * (update.lost is not None)
            for record in update.records:
                reasons[record.request_id] = record.finish_reason
        assert [status.alive for status in engine.status] == [False, True]
    assert reasons == dict.fromkeys((one.id for one in requests), FinishReason.LENGTH)
    (why,) = losses
    assert "no heartbeat came for 2 seconds" in why


def test_of_several_rings_those_with_messages_are_read():
    rings = []

    def start(config, *, process_rank, doorbell, **_):
        worker = ScriptedWorker(1, process_rank=process_rank)
        rings.append(RingReader.create(4, 64, doorbell=doorbell))
        return SimpleNamespace(
            ring=rings[-1], heartbeat=worker.heartbeat, tell=worker.tell, stop=worker.stop, pid=0
        )

    engine = Engine(settings(num_slots=1, num_ranks=2), start_worker=start)
    quiet, busy = engine.sessions
    with rings[0], rings[1], RingWriter.attach(rings[1].name) as writer:
        for session in engine.sessions:
            session.admit(QueuedRequest(request=long_requests(1)[0]))
        writer.send(encode(Kind.TARGET, 0, [], process_rank=1))
        assert parts_of(engine).workers.wait([quiet, busy], idle=False) == [busy]
        assert busy.receive(0).message.step == 0
        assert quiet.receive(0) is None
