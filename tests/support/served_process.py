"""`jax-specdec serve` as a process of its own, at a free port."""

import contextlib
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import httpx

from tests.support.processes import wait_for


def status(url):
    """The server's health: "loading", "ready", ...; empty where nobody answers."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=10).text
    return ""


@contextlib.contextmanager
def served(*options, env=None, module=("jax_specdec.cli.main",)):
    """Serve until the block ends, which SIGTERM does; yields the URL and the process.

    Args:
      module: that is the command line, with what comes before its own arguments.
    """
    command = [sys.executable, "-m", *module, "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)

    def is_ready():
        assert process.poll() is None, process.stderr.read()
        return '"ready"' in status(url)

    try:
        line = process.stderr.readline()
        found = re.search(r"at (http://\S+)/v1", line)
        assert found, line + process.stderr.read()
        url = found[1]
        wait_for(is_ready, 240)
        server = SimpleNamespace(url=url, process=process, exit_status=None)
        yield server
        process.send_signal(signal.SIGTERM)
        server.exit_status = process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
