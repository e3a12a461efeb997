"""Engine and worker as two real processes: from prompt to records, and when one of them dies."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ipc import RingReader, RingWriter
from ipc.doctor import find_ring_files
from ipc.wire import DeviceCheck, Kind
from jax_specdec.device.model.checkpoint import save_checkpoint
from jax_specdec.device.worker.device_checks import DeviceCheckError
from jax_specdec.engine import engine as engine_module
from jax_specdec.engine import worker_client
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.encode import encode
from jax_specdec.requests import RequestError
from tests.support import decoding
from tests.support.decoding import VOCAB, mixed_requests, random_model, request


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "random.safetensors"
    save_checkpoint(path, *random_model())
    return str(path)


CREATORS = {os.getpid()}  # processes of this test that make rings


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    yield
    wait_for(lambda: not [f for f in find_ring_files() if f.creator.pid in CREATORS])


def config(weights, **changes):
    sizes = {"num_slots": 3, "max_length": 96, "prefill_chunk": 8, "drafter": "ngram"}
    return EngineConfig(vocab_size=VOCAB, weights=weights, **sizes | changes)


def test_two_processes_deliver_what_one_computes(weights):
    requests = mixed_requests()
    expected = decoding.run(requests, "ngram")
    records = {item.id: [] for item in requests}
    with Engine(config(weights)) as engine:
        for update in engine.generate(requests):
            assert update.latency_ns > 0
            for record in update.records:
                records[record.request_id].append(record)
    assert engine.sessions[0].worker.exit_status == 0
    for item in requests:
        emitted = [t for record in records[item.id] for t in record.token_ids.tolist()]
        assert emitted == expected.token_ids(item.id)
        assert records[item.id][-1].finish_reason is FinishReason.LENGTH
        if item.params.logprobs is not None:
            got = np.concatenate([record.logprobs for record in records[item.id]])
            wanted = np.concatenate([record.logprobs for record in expected.records[item.id]])
            np.testing.assert_array_equal(got, wanted)


def test_two_ranks_are_read_side_by_side(weights):
    requests = mixed_requests(6)
    with Engine(config(weights, num_slots=2, num_ranks=2)) as engine:
        ranks, done = set(), []
        for update in engine.generate(requests):
            ranks.add(update.message.process_rank)
            done += [record.request_id for record in update.records if record.finish_reason]
        assert ranks == {0, 1}
        assert sorted(done) == [item.id for item in requests]
        assert all(rank.state.statistics.num_tokens > 0 for rank in engine.sessions)


@pytest.mark.slow
def test_one_process_prefills_and_another_decodes(weights):
    """The tokens are those of one worker; the second verifies the drafts that it is handed."""
    requests = [*mixed_requests(5), request("stop", [1, 2, 3], max_tokens=1, logprobs=2)]
    expected = decoding.run(requests, "ngram")
    records = {item.id: [] for item in requests}
    with Engine(config(weights, drafter="mtp", num_prefill_ranks=1)) as engine:
        assert [rank.prefill_only for rank in engine.sessions] == [False, True]
        for update in engine.generate(requests):
            for record in update.records:
                records[record.request_id].append((update.process_rank, record))
    for item in requests:
        ranks, found = zip(*records[item.id], strict=True)
        assert ranks[0] == 1
        assert set(ranks[1:]) <= {0}
        assert found[0].num_tokens == 1
        emitted = [t for record in found for t in record.token_ids.tolist()]
        assert emitted == expected.token_ids(item.id)
        assert [r.finish_reason for r in found if r.finish_reason] == [FinishReason.LENGTH]
        handed_over = found[0].handover_draft_ids
        if len(found) > 1:
            assert found[1].num_drafts == len(handed_over)
        if item.params.logprobs is not None:
            got = np.concatenate([record.logprobs for record in found])
            wanted = np.concatenate([record.logprobs for record in expected.records[item.id]])
            np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert any(len(found[0][1].handover_draft_ids) for found in records.values() if len(found) > 1)


def test_a_killed_rank_is_restarted_while_the_other_goes_on(weights):
    requests = mixed_requests(6, max_tokens=(40, 60))
    expected = decoding.run(requests, "ngram")
    ids, lost, after = {item.id: [] for item in requests}, [], set()
    # Few messages may wait in a ring: however late the kill comes, there is work left for both.
    sizes = {"num_slots": 2, "num_ranks": 2, "ring_slots": 2}
    settings = config(weights, **sizes, on_worker_loss="restart", resume_lost=True)
    with Engine(settings) as engine:
        first = engine.sessions[0].worker.pid
        for n, update in enumerate(engine.generate(requests)):
            for record in update.records:
                ids[record.request_id] += record.token_ids.tolist()
                assert record.finish_reason in (None, FinishReason.LENGTH)
            if update.lost:
                lost.append((update.process_rank, str(update.lost)))
            elif lost and update.records:
                after.add(update.process_rank)
            if not n:
                os.kill(first, signal.SIGKILL)
        status = engine.status
    ((rank, why),) = lost
    assert rank == 0
    assert f"process rank 0 (pid {first}) was killed by signal 9" in why
    assert 1 in after
    assert [each.restarts for each in status] == [1, 0]
    assert status[0].pid != first
    assert ids == {item.id: expected.token_ids(item.id) for item in requests}


def test_a_killed_worker_is_reported_and_its_requests_are_closed(weights):
    requests = mixed_requests(4, max_tokens=(50, 60))
    reasons = {}

    def collect(stream):
        for update in stream:
            for record in update.records:
                reasons[record.request_id] = record.finish_reason

    # Few messages may wait in the ring: however late the kill comes, no request has ended.
    with Engine(config(weights, ring_slots=2)) as engine:
        worker = engine.sessions[0].worker
        stream = engine.generate(requests)
        next(stream)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"killed by signal 9") as error:
            collect(stream)
    assert "another process, or from Linux where memory runs out" in str(error.value)
    assert "make a new engine" in str(error.value).lower()
    assert 'EngineConfig(on_worker_loss="restart")' in str(error.value)
    cause = error.value.__cause__  # the ring's own error: a traceback shows it too
    assert f"message {cause.last_sequence}. This session is over: whoever created" in str(cause)
    assert "create a new ring" not in f"{error.value} {cause}"
    lost = [name for name, reason in reasons.items() if reason is FinishReason.WORKER_LOST]
    assert len(lost) == 3  # the three that had slots; the fourth had not begun


def test_a_worker_that_cannot_start_says_why():
    with (
        Engine(config("/nowhere/weights.safetensors")) as engine,
        pytest.raises(WorkerFailed, match=r"(?s)status 1 .*no checkpoint at /nowhere"),
    ):
        list(engine.generate(mixed_requests(1)))


def fake_worker(code):
    """A worker program that runs `code` after it has read its first command as `start`."""
    head = "import json, os, sys, time\nstart = json.loads(sys.stdin.readline())\n"
    attach = "from ipc import RingWriter\nring = RingWriter.attach(start['ring'])\n"
    return (sys.executable, "-c", head + attach + code)


def failure_of(code, requests=None, on_worker_loss="stop"):
    """What an engine says of a worker that runs `code`, and why its requests ended."""
    settings = EngineConfig(
        vocab_size=VOCAB, num_slots=3, max_length=96, on_worker_loss=on_worker_loss
    )
    reasons = []

    def collect(engine):
        for update in engine.generate(requests or mixed_requests(2)):
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
def test_what_is_said_of_a_lost_worker_helps_who_never_saw_a_ring(code, how, memory, restart):
    text, _ = failure_of(code)
    assert f"{how}" in text
    assert "after 0 messages, before its requests were done\n" in text
    assert ("memory runs out" in text) == memory
    assert ('on_worker_loss="restart"' in text) == restart
    assert not re.search(r"\brings?\b|producer", text)
    text, _ = failure_of(code, on_worker_loss="continue")  # who chose knows what there is
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


def test_a_file_in_the_current_directory_is_not_imported_by_the_worker(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise RuntimeError('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    with (
        Engine(config("/nowhere/weights.safetensors")) as engine,
        pytest.raises(WorkerFailed, match="no checkpoint at /nowhere"),
    ):
        list(engine.generate(mixed_requests(1)))


def test_an_engine_goes_on_after_requests_were_given_up(weights):
    first, second, third = mixed_requests(3)
    with Engine(config(weights, num_slots=1)) as engine:
        for _ in engine.generate([first, second]):
            break
        done = {
            record.request_id
            for update in engine.generate([third, first])
            for record in update.records
        }
    assert done == {third.id, first.id}


def test_ids_may_be_numpy_integers(weights):
    item = request("r", np.arange(5, dtype=np.int32), max_tokens=2)
    with Engine(config(weights)) as engine:
        assert sum(len(update.records) for update in engine.generate([item])) > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_drafts", 65), ("num_drafts", -1), ("num_slots", 0), ("max_length", 1),
     ("ring_slots", 0), ("prefill_chunk", 0), ("vocab_size", 0)],
)  # fmt: skip
def test_sizes_are_checked_before_memory_is_taken(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value} must be from"):
        EngineConfig(**{"vocab_size": VOCAB, field: value})


@pytest.mark.fast
@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("drafter", "mtp, ngram, suffix, none$"),
        ("dtype", "float32, bfloat16, float16; empty for that of the weights"),
        ("on_worker_loss", "stop, continue, restart$"),
    ],
)
def test_a_choice_that_is_not_known_is_refused_before_a_worker_starts(field, known):
    for value in ("x", "MTP", "fp32"):
        with pytest.raises(ValueError, match=f"^{field} = '{value}' must be one of {known}"):
            EngineConfig(**{"vocab_size": VOCAB, field: value})


@pytest.mark.fast
def test_what_a_worker_can_be_told_is_not_refused():
    for drafter in ("mtp", "ngram", "suffix", "none"):
        for dtype in ("", "bfloat16", "float32", "float16"):
            settings = EngineConfig(vocab_size=VOCAB, drafter=drafter, dtype=dtype)
            assert (settings.drafter, settings.dtype) == (drafter, dtype)


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


def test_requests_that_cannot_be_served_are_refused_before_anything_runs(weights):
    settings = config(weights)
    with pytest.raises(RequestError, match=r"token id 99 is outside the vocabulary \(0 to 31\)"):
        check(request("r", [1, 99]), settings)
    with pytest.raises(RequestError, match=r"90 prompt tokens and max_tokens = 64 exceed the 96"):
        check(request("r", [1] * 90), settings)
    with pytest.raises(RequestError, match="logprobs = 33, but the vocabulary has only 32"):
        check(request("r", [1], logprobs=33), settings)
    with pytest.raises(RequestError, match=r"extra token id 32 is outside the vocabulary"):
        check(request("r", [1], logprobs=0, extra_token_ids=(1, 32)), settings)
    with pytest.raises(RequestError, match="prompt_logprobs = 33, but the vocabulary has only 32"):
        check(request("r", [1], prompt_logprobs=33), settings)


def test_a_failed_check_on_the_device_raises_in_the_worker_and_nothing_is_sent():
    item = request("r", [1, 2, 3], max_tokens=5, logprobs=1)

    def distort(output):
        return output._replace(token_ids=output.token_ids.at[0, 0].set(VOCAB))

    with pytest.raises(DeviceCheckError, match=DeviceCheck.TOKEN_ID.name):
        decoding.run([item], "none", distort=distort)

    def too_many(output):
        return output._replace(num_tokens=output.num_tokens + 9)

    with pytest.raises(DeviceCheckError, match=DeviceCheck.SLOT_COUNTS.name):
        decoding.run([item], "none", distort=too_many)


def demo(*options, **kwargs):
    command = [sys.executable, "-u", "-m", "jax_specdec.cli.main", "demo", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )
    CREATORS.add(process.pid)
    return process


def worker_of(pid):
    """The worker that a demo has started."""
    for _ in range(1200):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.05)
    raise AssertionError("the demo started no worker")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended while it was read
        return False


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def many_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("import sys\n" * 500)
    return str(path)


def interrupted(process):
    """Press Ctrl-C and see both processes end; returns what was printed to stderr."""
    worker = worker_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    wait_for(lambda: not is_alive(worker))
    return errors


def test_ctrl_c_while_the_worker_starts(many_prompts):
    process = demo("--prompts", many_prompts, start_new_session=True)
    worker_of(process.pid)
    time.sleep(0.5)
    assert interrupted(process).startswith("interrupted")


def test_ctrl_c_while_tokens_come(many_prompts):
    process = demo("--prompts", many_prompts, start_new_session=True)
    while "done" not in process.stdout.readline():
        assert process.poll() is None
    errors = interrupted(process)
    assert errors.startswith("interrupted")
    assert "Traceback" not in errors


def test_a_worker_does_not_outlive_a_killed_engine(many_prompts):
    process = demo("--prompts", many_prompts)
    worker = worker_of(process.pid)
    while "done" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    wait_for(lambda: not is_alive(worker))


def test_a_worker_that_starts_after_its_engine_died_cleans_up(many_prompts):
    process = demo("--prompts", many_prompts)
    worker = worker_of(process.pid)
    time.sleep(0.3)  # it imports jax: it has not attached
    process.kill()
    process.communicate()
    wait_for(lambda: not is_alive(worker))  # then the fixture looks at what is left
