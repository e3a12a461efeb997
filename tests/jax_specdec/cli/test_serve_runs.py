"""Whole runs of `jax-specdec serve` over scripted workers: what it says, and how it ends."""

import os
import resource
import signal

import httpx
import pytest

from jax_specdec.cli import argument_types, serve_bounds
from tests.support.processes import children_of, wait_for
from tests.support.served_process import served, status

SCRIPTED = ("tests.support.scripted_process", "-1")


def kill_worker(server):
    """Kill the worker, and wait until there is another one, or the server has ended."""
    (pid,) = children_of(server.process.pid)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid not in children_of(server.process.pid))
    wait_for(lambda: children_of(server.process.pid) or server.process.poll() is not None)
    return pid


def test_an_idle_worker_that_is_killed_is_replaced_without_a_request():
    with served(module=SCRIPTED) as server:
        pid = kill_worker(server)
        wait_for(lambda: '"ready"' in (status(server.url) or ""))
        body = {"prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
        server.process.send_signal(signal.SIGTERM)
        log = server.process.stderr.read()
    assert server.exit_status == 0
    (line,) = [line for line in log.splitlines() if f"(pid {pid}) was killed by signal 9" in line]
    assert "WARNING a worker is lost, with no request: the model worker" in line
    assert (log.count("a new worker was started"), log.count("takes requests")) == (1, 2)
    assert log.index("the server ends") < log.index("the server has ended")


def test_an_engine_that_has_stopped_for_good_ends_the_server_with_a_status():
    with served("--max-restarts", "1", module=SCRIPTED) as server:
        for _ in range(2):
            kill_worker(server)
        log = server.process.stderr.read()
    assert server.exit_status == 1
    (line,) = [line for line in log.splitlines() if "ERROR the engine has stopped" in line]
    assert "was killed by signal 9" in line
    assert log.count("WARNING a worker is lost") == 2


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
