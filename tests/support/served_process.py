"""`jax-specdec serve` as a process of its own, at a free port."""

import contextlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace


def status(url):
    """The server's health: "loading", "ready", ..., or None where nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return None


@contextlib.contextmanager
def served(*options, env=None, module=("jax_specdec.cli.main",)):
    """Serve until the block ends, which SIGTERM does; yields the URL and the process.

    Args:
      module: that is the command line, with what comes before its own arguments.
    """
    command = [sys.executable, "-m", *module, "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        line = process.stderr.readline()
        found = re.search(r"at (http://\S+)/v1", line)
        assert found, line + process.stderr.read()
        url = found[1]
        deadline = time.monotonic() + 240
        while '"ready"' not in (status(url) or ""):
            assert time.monotonic() < deadline, "it does not get ready"
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        server = SimpleNamespace(url=url, process=process, exit_status=None)
        yield server
        process.send_signal(signal.SIGTERM)
        server.exit_status = process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
