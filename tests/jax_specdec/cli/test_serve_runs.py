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

pytestmark = pytest.mark.fast


@contextlib.contextmanager
def serving(tmp_path, *options):
    """A server that is ready; `log` reads what it has said."""
    path = tmp_path / "log"
    with path.open("w") as file:
        process = start_command("serve", "--port", 0, *options, stderr=file)
    try:
        wait_for(lambda: "takes requests" in path.read_text() or process.poll() is not None)
        url = re.search(r"at (http://\S+)/v1", path.read_text())[1]
        yield SimpleNamespace(process=process, url=url, log=path.read_text)
    finally:
        process.kill()
        process.wait()


def lines(server, part):
    return [line for line in server.log().splitlines() if part in line]


def health(server):
    return httpx.get(f"{server.url}/health", timeout=60)


def test_an_idle_worker_that_is_killed_is_replaced_without_a_request(tmp_path):
    with serving(tmp_path) as server:
        for deaths in range(1, 3):
            (pid,) = children_of(server.process.pid)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda n=deaths: len(lines(server, "takes requests")) == n + 1)
            assert health(server).status_code == 200
            (line,) = lines(server, f"(pid {pid}) was killed by signal 9")
            assert "WARNING a worker is lost, with no request: the model worker" in line
        assert len(lines(server, "a new worker was started")) == 2
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=60
        )
        assert answer.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        (ends,) = lines(server, "the server ends")
        (ended,) = lines(server, "the server has ended")
        assert ends < ended


def test_an_engine_that_has_stopped_for_good_ends_the_server_with_a_status(tmp_path):
    with serving(tmp_path, "--max-restarts", 1) as server:
        for _ in range(2):
            (pid,) = children_of(server.process.pid)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda gone=pid: gone not in children_of(server.process.pid))
            wait_for(lambda: children_of(server.process.pid) or server.process.poll() is not None)
        assert server.process.wait(30) == 1
        (line,) = lines(server, "ERROR the engine has stopped")
        assert "was killed by signal 9" in line
        assert len(lines(server, "WARNING a worker is lost")) == 2


def test_options_are_checked(tmp_path):
    path = tmp_path / "log"
    for option, value in (
        ("--restart-window", "0.5"),
        ("--max-restarts", -1),
        ("--log-level", "x"),
        ("--timeout", "inf"),
        ("--timeout", 0),
        ("--client-timeout", "nan"),
        ("--max-connections", 0),
        ("--host", "0.0.0.0"),
    ):
        with path.open("w") as file:
            assert start_command("serve", option, value, stderr=file).wait(30) == 2
        assert option in path.read_text()
        assert "Traceback" not in path.read_text()


@pytest.mark.parametrize(
    ("host", "given", "names"),
    [
        ("127.0.0.1", [], set()),
        ("localhost", [], set()),
        ("127.0.0.9", [], {"127.0.0.9"}),
        ("::1", ["Own.Example:80"], {"own.example"}),
        ("0.0.0.0", ["gpu", "gpu.example"], {"gpu", "gpu.example"}),
        ("10.0.0.1", ["gpu"], {"gpu", "10.0.0.1"}),
        ("127.0.0.1", ["*"], None),
        ("::", ["gpu", "*"], None),
    ],
)
def test_the_names_by_which_the_server_may_be_called(host, given, names):
    loopback = {"localhost", "127.0.0.1", "::1"}
    expected = None if names is None else names | loopback
    assert bounds_of("--host", host, *(f"--allowed-host={one}" for one in given)) == expected


def bounds_of(*options):
    parser = argument_types.Parser()
    parser.add_argument("--host")
    serve_bounds.add_bounds(parser)
    return serve_bounds.bounds(parser.parse_args(options)).allowed_hosts


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu.example"])
def test_where_others_reach_the_server_it_must_be_said_how_they_call_it(host):
    with pytest.raises(ValueError, match=rf"--host {host} .* \(--allowed-host '\*'\)"):
        bounds_of("--host", host)


def test_connections_need_files(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    serve_bounds.allow_files(100)
    assert not limits
    serve_bounds.allow_files(1024)
    assert limits == [(1280, 4096)]
    with pytest.raises(ValueError, match=r"allows 4096 .*: give --max-connections 3840"):
        serve_bounds.allow_files(4000)
