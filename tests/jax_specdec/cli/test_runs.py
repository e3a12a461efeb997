"""Whole runs of `jax-specdec generate` and `serve`: what they say, how they end and go on.

Over scripted workers; files, signals and the ends of processes are the real ones.
"""

import json
import os
import re
import resource
import signal
import subprocess

import httpx
import pytest

from ipc.doctor import find_ring_files
from jax_specdec.cli import argument_types, serve_bounds
from tests.support.processes import children_of, wait_for
from tests.support.scripted_process import start_command
from tests.support.served_process import served, status


def start(*options, hold=-1, **pipes):
    """Start the command; its workers fall silent after `hold` messages."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return start_command("generate", *options, hold=hold, **pipes)


def ended(process, by=lambda process: None):
    """The standard error of a command that `by(process)` ends."""
    try:
        by(process)
        return process.communicate(timeout=250)[1]
    finally:
        process.kill()
        process.wait()


def written(path):
    """Records by id, without times, digests and the numbers of steps."""
    found = {}
    for record in map(json.loads, path.read_text().splitlines()):
        assert record["id"] not in found
        found[record["id"]] = record
        for name in ("created", "request_digest"):
            record.pop(name, None)
        for step in record["speculation"]["by_step"]:
            del step["step"]
    return found


def test_a_long_tmpdir_holds_the_engine(model, tmp_path):
    """The path of a socket has at most 107 bytes, and TMPDIR may have more."""
    folder = tmp_path / ("d" * 150)
    folder.mkdir()
    options = ["--model", model, "--prompt", "a", "--max-tokens", 3, "--quiet"]
    process = start(*options, env=os.environ | {"TMPDIR": str(folder)})
    errors = ended(process)
    assert (process.returncode, list(folder.iterdir())) == (0, [])
    assert "1 of 1 request" in errors


def test_a_killed_run_goes_on(model, tmp_path):
    def kill(process):
        wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= 2)
        process.send_signal(signal.SIGKILL)

    file, path, whole = tmp_path / "p.txt", tmp_path / "o.jsonl", tmp_path / "whole.jsonl"
    file.write_text("".join(f"prompt number {index}\n" for index in range(14)))
    options = ["--model", model, "--prompts", file, "--max-tokens", 60, "--slots", 2,
               "--temperature", 0.9, "--logprobs", 1, "--drafter", "ngram", "--quiet"]  # fmt: skip
    ended(start(*options, "--output", path, hold=200), kill)
    before = b"".join(path.read_bytes().splitlines(keepends=True)[:-1])
    assert 1 <= before.count(b"\n") < 14  # it was killed in the middle
    with path.open("r+b") as out:  # and, as a write may be cut, in the middle of its last line
        out.truncate(len(before) + 100)
    error = ended(start(*options, "--output", path))
    assert "cut off a half-written record of 100 bytes" in error
    assert f"in the output already: {before.count(bytes([10]))} of 14 requests" in error
    assert path.read_bytes().startswith(before)
    ended(start(*options, "--output", whole))
    assert written(path) == written(whole)
    said = "in the output already: 14 of 14 requests\n"
    process = start(*options, "--output", path, stderr=subprocess.STDOUT)
    assert process.communicate(timeout=250)[0] == said
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("end", "kept"), [("interrupt", True), ("lost worker", True), ("lost worker", False)]
)
def test_a_run_that_ends_early_says_how_to_go_on(end, kept, model, tmp_path):
    def stop(process):
        assert process.stdout.read(12).startswith("== 1 ==")  # texts have begun
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            (child,) = children_of(process.pid)
            os.kill(child, signal.SIGKILL)

    (tmp_path / "p.txt").write_text("a\n" * 50)  # enough to do, however late it is stopped
    options = ["--model", model, "--prompts", tmp_path / "p.txt", "--max-tokens", 400,
               "--slots", 1, *(["--output", tmp_path / "o.jsonl"] if kept else ())]  # fmt: skip
    process = start(*options, hold=10)
    error = ended(process, stop)
    assert process.returncode == (130 if end == "interrupt" else 1)
    said = r"ended before that: \d+ of 50 requests, kept in .*o.jsonl: run the same command again"
    if not kept:
        said = "with --output they are kept, and the same command runs the others"
    assert re.search(said, error)
    assert end == "interrupt" or re.search(r"(?s)was killed by signal 9.*memory runs out", error)
    assert not re.search(r"\bring\b|Engine", error)
    assert not [file for file in find_ring_files() if file.creator.pid == process.pid]


@pytest.mark.parametrize("full", ["the output", "standard output"])
def test_what_cannot_be_written_is_named_with_what_was_kept(full, model, tmp_path):
    (tmp_path / "p.txt").write_text("a\n")
    output = "/dev/full" if full == "the output" else tmp_path / "o.jsonl"
    options = ["--model", model, "--prompts", tmp_path / "p.txt", "--max-tokens", 2]
    with open("/dev/full" if full == "standard output" else os.devnull, "w") as shown:
        process = start(*options, "--output", output, stdout=shown)
        error = ended(process)
    assert process.returncode in (2, 120)  # 120: Python cannot close its standard output
    name, kept = (output, 0) if full == "the output" else (full, "[01]")
    assert f"No space left on device: '{name}'" in error
    assert re.search(rf"ended before that: {kept} of 1 request, kept in {output}: run", error)
    assert "Traceback" not in error


SCRIPTED = ("tests.support.scripted_process", "-1")


def kill_worker(server):
    """Kill the worker, and wait until there is another one, or the server has ended."""
    (pid,) = children_of(server.process.pid)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid not in children_of(server.process.pid))
    wait_for(lambda: children_of(server.process.pid) or server.process.poll() is not None)
    return pid


def test_a_killed_idle_worker_is_replaced():
    with served("--no-grammars", module=SCRIPTED) as server:  # which have a process, too
        pid = kill_worker(server)
        log = ""
        while log.count("takes requests") < 2:  # the server's health may still be of the lost one
            line = server.process.stderr.readline()
            assert line, log
            log += line
        wait_for(lambda: '"ready"' in (status(server.url) or ""))
        body = {"prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
        server.process.send_signal(signal.SIGTERM)
        log += server.process.stderr.read()
    assert server.exit_status == 0
    (line,) = [line for line in log.splitlines() if f"(pid {pid}) was killed by signal 9" in line]
    assert "WARNING a worker is lost, with no request: the model worker" in line
    assert (log.count("a new worker was started"), log.count("takes requests")) == (1, 2)
    assert log.index("the server ends") < log.index("the server has ended")


def streamed(server, sent):
    """The events of a long stream; once it has begun, `sent` is called."""
    body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        events = [next(lines)]
        sent()
        return [line for line in [*events, *lines] if line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_for_all_processes_let_streams_end_whole(number):
    """As systemd sends SIGTERM: to the server and to its workers, which it needs until the end."""
    with served(module=SCRIPTED) as server:
        workers = children_of(server.process.pid)
        assert workers

        def signal_all():
            for pid in workers:
                os.kill(pid, number)
            os.kill(server.process.pid, number)

        events = streamed(server, signal_all)
        log = server.process.stderr.read()
    assert (events[-1], len(events) > 50) == ("data: [DONE]", True)
    assert not [event for event in events if '"error"' in event]
    assert server.exit_status == 0
    assert "Traceback" not in log
    assert "is lost" not in log
    assert log.count("the server has ended") == 1


def test_an_engine_that_stopped_ends_the_server():
    with served("--max-restarts", "1", "--no-grammars", module=SCRIPTED) as server:
        for _ in range(2):
            kill_worker(server)
        log = server.process.stderr.read()
    assert server.exit_status == 1
    (line,) = [line for line in log.splitlines() if "ERROR the engine has stopped" in line]
    assert "was killed by signal 9" in line
    assert log.count("WARNING a worker is lost") == 2


@pytest.mark.parametrize(("host", "given", "names"), [
    *((host, [], set()) for host in ("127.0.0.1", "localhost")),
    ("127.0.0.9", [], {"127.0.0.9"}), ("::1", ["Own.Example:80"], {"own.example"}),
    ("0.0.0.0", ["gpu", "gpu.example"], {"gpu", "gpu.example"}),
    ("10.0.0.1", ["gpu"], {"gpu", "10.0.0.1"}), ("127.0.0.1", ["*"], None),
    ("::", ["gpu", "*"], None),
])  # fmt: skip
def test_the_names_by_which_the_server_may_be_called(host, given, names):
    parser = argument_types.Parser()
    parser.add_argument("--host")
    serve_bounds.add_bounds(parser)
    options = parser.parse_args(["--host", host, *(f"--allowed-host={one}" for one in given)])
    expected = None if names is None else names | {"localhost", "127.0.0.1", "::1"}
    assert serve_bounds.bounds(options).allowed_hosts == expected


def test_connections_need_files():
    endless = resource.RLIM_INFINITY
    for count, soft, hard, needed in (
        (100, 1024, 4096, 0), (768, 1024, 4096, 0), (1024, 1024, 4096, 1280),
        (3840, 1024, 4096, 4096), (9999, endless, endless, 0), (9999, 1024, endless, 10255),
    ):  # fmt: skip
        assert serve_bounds.files_needed(count, soft, hard) == needed
    with pytest.raises(ValueError, match=r"allows 4096 .*: give --max-connections 3840"):
        serve_bounds.files_needed(3841, 1024, 4096)
