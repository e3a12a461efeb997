"""Whole runs of `jax-specdec serve` over scripted workers: what it says, and how it ends."""

import contextlib
import os
import re
import resource
import signal
from types import SimpleNamespace

import httpx
import pytest

from jax_specdec.cli import argument_types, serve_bounds
from tests.support.processes import children_of, wait_for
from tests.support.scripted_process import start_command


@contextlib.contextmanager
def serving(tmp_path, *options):
    """A server that is ready; `lines` are those of its log with some words, `kill` its worker."""

    def lines(part):
        return [line for line in path.read_text().splitlines() if part in line]

    def kill():
        (pid,) = children_of(process.pid)
        os.kill(pid, signal.SIGKILL)
        return pid

    path = tmp_path / "log"
    with path.open("w") as file:
        process = start_command("serve", "--port", 0, *options, stderr=file)
    try:
        wait_for(lambda: lines("takes requests") or process.poll() is not None)
        url = re.search(r"at (http://\S+)/v1", path.read_text())[1]
        yield SimpleNamespace(process=process, url=url, lines=lines, kill=kill)
    finally:
        process.kill()
        process.wait()


def test_an_idle_worker_that_is_killed_is_replaced_without_a_request(tmp_path):
    with serving(tmp_path) as server:
        pid = server.kill()
        wait_for(lambda: len(server.lines("takes requests")) == 2)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        (line,) = server.lines(f"(pid {pid}) was killed by signal 9")
        assert "WARNING a worker is lost, with no request: the model worker" in line
        assert len(server.lines("a new worker was started")) == 1
        body = {"prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        (ends,) = server.lines("the server ends")
        (ended,) = server.lines("the server has ended")
        assert ends < ended


def test_an_engine_that_has_stopped_for_good_ends_the_server_with_a_status(tmp_path):
    with serving(tmp_path, "--max-restarts", 1) as server:
        for _ in range(2):
            pid = server.kill()
            wait_for(lambda gone=pid: gone not in children_of(server.process.pid))
            wait_for(lambda: children_of(server.process.pid) or server.process.poll() is not None)
        assert server.process.wait(30) == 1
        (line,) = server.lines("ERROR the engine has stopped")
        assert "was killed by signal 9" in line
        assert len(server.lines("WARNING a worker is lost")) == 2


@pytest.mark.parametrize(
    ("host", "given", "names"),
    [
        *((host, [], set()) for host in ("127.0.0.1", "localhost")),
        ("127.0.0.9", [], {"127.0.0.9"}),
        ("::1", ["Own.Example:80"], {"own.example"}),
        ("0.0.0.0", ["gpu", "gpu.example"], {"gpu", "gpu.example"}),
        ("10.0.0.1", ["gpu"], {"gpu", "10.0.0.1"}),
        ("127.0.0.1", ["*"], None),
        ("::", ["gpu", "*"], None),
    ],
)
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
