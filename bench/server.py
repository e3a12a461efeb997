"""Requests to the server over a connection that is kept, and over a new one each.

The server is the one that `jax-specdec serve` starts, with the tiny model. The client is Python's
own `http.client`, so that little of a request's time is the client's.
"""

import contextlib
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.timing import BenchError, Comparison, Target, compare

KEPT, NEW = "a kept connection", "a new one each"
START_SECONDS = 240.0
LIMIT = 1.25  # of the time over new connections; where an answer waits for an acknowledgement, 80
REQUESTS = {
    "GET /v1/models": ("GET", "/v1/models", None),
    "a completion of one token": (
        "POST", "/v1/completions", {"prompt": "def", "max_tokens": 1, "temperature": 0}),
}  # fmt: skip


def run(quick: bool) -> list[Comparison]:
    """Measure both requests over both connections, in turn."""
    with served() as (host, port, _):
        return [_measure(title, host, port, quick) for title in REQUESTS]


def _measure(title: str, host: str, port: int, quick: bool) -> Comparison:
    method, path, body = REQUESTS[title]

    def ask(link: http.client.HTTPConnection) -> Any:
        content = None if body is None else json.dumps(body)
        link.request(method, path, content, {"content-type": "application/json"})
        answer = link.getresponse()
        data = json.loads(answer.read())
        return answer.status, data.get("choices", data.get("data"))

    def over_new() -> Any:
        with contextlib.closing(http.client.HTTPConnection(host, port)) as link:
            return ask(link)

    with contextlib.closing(http.client.HTTPConnection(host, port)) as kept:
        found = compare(
            title,
            {KEPT: lambda: ask(kept), NEW: over_new},
            check=_same,
            rounds=15 if quick else 60,
            min_seconds=0.05,
        )
    taken = found[KEPT].median / found[NEW].median
    target = Target(f"{title}: a kept connection over new ones", LIMIT, taken, "x")
    return replace(found, targets=(target,))


def _same(name: str, expected: Any, actual: Any) -> None:
    """Raises AssertionError unless both answers are good and equal."""
    assert expected[0] == 200, expected
    assert actual == expected


@contextlib.contextmanager
def served(*options: str) -> Iterator[tuple[str, int, int]]:
    """A server that is ready: its host, a free port, and the id of its process."""
    command = [sys.executable, "-m", "jax_specdec.cli", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"at http://(\S+):(\d+)/v1", line)
            if found is None:
                raise BenchError(f"the server did not start: {line.strip()}")
            host, port = found[1], int(found[2])
            deadline = time.monotonic() + START_SECONDS
            while not _is_ready(host, port):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise BenchError("the server did not become ready")
                time.sleep(0.1)
            yield host, port, process.pid
        finally:
            process.terminate()


def _is_ready(host: str, port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection(host, port)) as link:
        link.request("GET", "/health")
        return link.getresponse().status == 200
