"""A stranger without the key tries all limits of a keyed server at once, beside 8 keyed streams.

    python -m tests.heavy.serve_stranger [SECONDS]

The largest gap between two chunks of a stream stays within 50 ms of that of an undisturbed run of
the same length, no stream ends early, and the server's memory grows by less than 200 MB. Other load
of the machine makes gaps too, so one more figure is independent of it: the most CPU time that a
round of the server's event loop takes, which is how long it holds up its streams, is below 50 ms.
The stranger is a process of a low priority: others have machines of their own.

    python -m tests.heavy.serve_stranger stranger URL SECONDS

is that process; it prints how often it tried what. The server's worker has no model: it emits two
tokens a slot every 10 ms, so that the machine has time for all of them.
"""

import asyncio
import collections
import contextlib
import functools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

import jax_specdec.engine as package
from jax_specdec.cli.main import main as command
from jax_specdec.engine import engine
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerProcess
from tests.support.served_process import served

KEY = "the key that the stranger has not"
# A program of the benchmarks: a worker without a model, all of whose slots emit in every step.
EMITTER = (sys.executable, "-m", "jax_specdec.child", "tests.support.emitting_worker")
TOKENS = 2  # of a slot and step, there
PACE = "BENCH_RAY_PACE"  # microseconds of a step, there
ROUNDS = "SERVE_STRANGER_ROUNDS"  # a file for the longest round of the event loop, in ms
STARTED_SECONDS = 8  # after which a round of the event loop counts: the first ones import modules
STREAMS = 8
HELD = 256  # connections of each kind that are held, and that the server may have
GAP_MS, GROWTH_MB = 50, 200
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"authorization: Bearer guess\r\n"
)
PIECE = b"x" * (1 << 16)
LARGE = json.dumps({"prompt": "a" * 1000, "prompt_logprobs": 512, "n": 128}).encode()


def get(path, host=b"localhost", more=b""):
    return b"GET " + path + b" HTTP/1.1\r\nhost: " + host + b"\r\n" + more + b"\r\n"


def posted(size, body=b""):
    return POST + b"content-length: %d\r\n\r\n" % size + body


# What is sent once, and what is sent behind it so many times, as far as it is taken.
SENT = {
    "a URL of 100 MB": (b"GET /", PIECE, 1600),
    "a header of 96 MB": (b"GET / HTTP/1.1\r\nx: ", PIECE, 1500),
    "headers without an end": (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 10_000, 1000),
    "a large head at once": (get(b"/health", more=b"x: " + PIECE + b"\r\n"), b"", 1),
    "a body of 15 MB": (posted(240 << 16), PIECE, 240),
    "a body without an end": (
        POST + b"transfer-encoding: chunked\r\n\r\n", b"10000\r\n" + PIECE + b"\r\n", 9**9,
    ),
    "a large answer": (posted(len(LARGE), LARGE), b"", 1),
    "another name": (get(b"/health", host=b"evil.example"), b"", 1),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"", 1),
    "pages": (b"".join(map(get, (b"/metrics", b"/health", b"/openapi.json"))), b"", 1),
}  # fmt: skip
# What is sent on many connections, each of which is held until the server ends it.
HALVES = {"half a head": b"GET /health HTTP/1.1\r\nx: ", "a body of one byte": posted(1000, b"{")}


class Stranger:
    """Ways to disturb a server, each of which is tried again and again."""

    def __init__(self, url):
        address = urlsplit(url)
        self._address = address.hostname, address.port
        self.tried = collections.Counter()

    @contextlib.asynccontextmanager
    async def _connected(self, what, receive_buffer=None):
        """A connection; that it ends is no error."""
        made = socket.socket()
        made.setblocking(False)
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        writer = None
        try:
            await asyncio.get_running_loop().sock_connect(made, self._address)
            reader, writer = await asyncio.open_connection(sock=made)
            self.tried[what] += 1
            yield reader, writer
        except OSError:
            await asyncio.sleep(0.01)
        finally:
            if writer is not None:
                writer.transport.abort()
            made.close()

    async def send(self, what):
        first, again, times = SENT[what]
        async with self._connected(what) as (reader, writer):
            writer.write(first)
            for _ in range(times):
                writer.write(again)
                await writer.drain()
            await reader.read(1 << 18)

    async def hold(self, what):
        async def one():
            async with self._connected(what) as (reader, writer):
                writer.write(HALVES[what])
                while await reader.read(1 << 16):
                    pass

        await asyncio.gather(*(one() for _ in range(HELD)))

    async def unread(self, what):
        async def one():
            async with self._connected(what, 4096) as (_, writer):
                writer.write(get(b"/openapi.json") * 1000)
                await writer.drain()
                await asyncio.sleep(60)

        await asyncio.gather(*(one() for _ in range(50)))

    async def disturb(self, seconds):
        """Try all of them at once."""

        async def again(way, what):
            while True:
                await way(what)

        ways = [(self.send, what) for what in SENT] + [(self.hold, what) for what in HALVES]
        ways.append((self.unread, "answers that are not read"))
        tasks = [asyncio.create_task(again(*way)) for way in ways]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stream(http, seed, until, gaps):
    """Streams one after the other; the times between their chunks go to `gaps`."""
    while time.monotonic() < until:
        body = {
            "prompt": "def f(", "max_tokens": 400, "logprobs": 2, "stream": True, "seed": seed,
            "temperature": 1.0, "ignore_eos": True,
        }  # fmt: skip
        last = None
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.status_code
            end = ""
            async for line in answer.aiter_lines():
                assert '"error"' not in line, line
                if line:
                    now = time.monotonic()
                    if last is not None:
                        gaps.append((now - last) * 1e3)
                    last = now
                    end = line
            assert end == "data: [DONE]", end


async def streams(url, seconds):
    """The gaps of all streams, in ms."""
    gaps, until = [], time.monotonic() + seconds
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers) as http:
        await asyncio.gather(*(stream(http, seed, until, gaps) for seed in range(STREAMS)))
    return sorted(gaps)


async def watched(process, streams):
    """What the streams bring, and the most memory of the server meanwhile, in MB."""
    task, most = asyncio.ensure_future(streams), 0.0
    memory = Path(f"/proc/{process.pid}/statm")
    while not task.done():
        most = max(most, int(memory.read_text().split()[1]) * resource.getpagesize() / (1 << 20))
        await asyncio.wait([task], timeout=0.2)
    return task.result(), most


def report(name, gaps):
    middle, high = gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    print(
        f"{name}: gaps p50 {middle:.1f} ms, p99 {high:.1f} ms, largest {gaps[-1]:.1f} ms "
        f"({len(gaps)} of them; load {load})",
        flush=True,
    )


def disturb(url, seconds):
    """The stranger's process."""
    os.nice(10)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    stranger = Stranger(url)
    asyncio.run(stranger.disturb(float(seconds)))
    print(json.dumps(stranger.tried))


def command_line(*arguments):
    """`jax-specdec` with workers that have no model."""
    start = functools.partial(WorkerProcess, program=EMITTER)
    package.Engine = engine.Engine = functools.partial(Engine, start_worker=start)
    most, run_once = 0.0, asyncio.SelectorEventLoop._run_once

    def measured(loop):
        nonlocal most
        before = time.thread_time()
        run_once(loop)
        if time.monotonic() > began:
            most = max(most, time.thread_time() - before)

    began = time.monotonic() + STARTED_SECONDS

    asyncio.SelectorEventLoop._run_once = measured
    status = command(arguments)
    Path(os.environ[ROUNDS]).write_text(str(most * 1e3))
    return status


def main(seconds="60"):
    rounds = Path(tempfile.mkdtemp()) / "rounds"
    env = os.environ | {"JAX_SPECDEC_API_KEY": KEY, PACE: str(10_000), ROUNDS: str(rounds)}
    options = (
        "--slots", str(STREAMS), "--drafts", str(TOKENS - 1), "--client-timeout", "5",
        "--max-connections", str(HELD),
    )  # fmt: skip
    with served(*options, env=env, module=(__spec__.name, "command")) as server:
        asyncio.run(streams(server.url, 1))
        httpx.get(f"{server.url}/metrics", timeout=60)  # what the first one imports
        alone, before = asyncio.run(watched(server.process, streams(server.url, float(seconds))))
        report("undisturbed", alone)
        command = [sys.executable, "-m", __spec__.name, "stranger", server.url, seconds]
        stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        beside, most = asyncio.run(watched(server.process, streams(server.url, float(seconds))))
        tried = json.loads(stranger.communicate(timeout=60)[0])
        report("with the stranger", beside)
        print(f"the stranger: {tried}")
        print(f"the server's memory: {before:.0f} MB before, at most {most:.0f} MB")
        page = httpx.get(f"{server.url}/metrics", timeout=60).text
        print("\n".join(line for line in page.splitlines() if line.startswith("jax_specdec_http")))
    assert server.exit_status == 0, server.exit_status
    longest = float(rounds.read_text())
    print(f"CPU time of the longest round of the server's event loop: {longest:.1f} ms")
    assert len(tried) == 13
    assert longest < GAP_MS
    assert most - before < GROWTH_MB
    assert beside[-1] - alone[-1] < GAP_MS
    print("the stranger has disturbed nobody")


if __name__ == "__main__":
    if sys.argv[1:2] == ["stranger"]:
        disturb(*sys.argv[2:])
    elif sys.argv[1:2] == ["command"]:
        sys.exit(command_line(*sys.argv[2:]))
    else:
        main(*sys.argv[1:])
