"""Many requests at once: over kept connections to the server, and to the engine alone.

64 streams, each of 64 tokens with the logprobs of five; and 512 short requests of 8 tokens, 8 one
after the other on each of 64 connections. The server is what `jax-specdec serve` starts, with the
tiny model; the engine runs in this process, with the same options. Both answer the same requests,
in turn. The client is this process, with as little between it and the socket as HTTP needs, since
it takes time of the same cores.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.comparison import from_samples
from bench.server import served
from bench.timing import BenchError, Comparison
from jax_specdec.engine import Engine, EngineConfig
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.text import byte_tokens

ENGINE, SERVER = "the engine alone", "the server"
CONNECTIONS, EACH = 64, 8
STREAMED, SHORT = 64, 8  # tokens
LOGPROBS, MAX_LENGTH = 5, 128
PROMPT = "def f(x): return x *"
PATH = "/v1/completions"


@dataclass
class Load:
    """What one round of requests took."""

    seconds: float = 0.0  # until all have ended
    firsts: list[float] = field(default_factory=list)  # seconds of each request to its first tokens
    own_cpu: float = 0.0  # seconds of this process
    server_cpu: float = 0.0  # of the server's, without its worker


Ask = Callable[[int, int, bool], Awaitable[float]]  # (connection, tokens, streamed) -> to the first


async def load_of(ask: Ask, tokens: int, each: int, streamed: bool) -> Load:
    """`each` requests one after the other from all connections at once."""
    load = Load()

    async def client(connection: int) -> None:
        for _ in range(each):
            load.firsts.append(await ask(connection, tokens, streamed))

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(client, range(CONNECTIONS)))
    load.seconds, load.own_cpu = time.perf_counter() - began, time.process_time() - cpu
    return load


class Connections:
    """Kept connections to the server."""

    def __init__(
        self, host: str, streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> None:
        self._host, self._streams = host, streams

    @classmethod
    async def opened(cls, host: str, port: int) -> "Connections":
        """As many as there are clients."""
        opening = [asyncio.open_connection(host, port) for _ in range(CONNECTIONS)]
        return cls(f"{host}:{port}", await asyncio.gather(*opening))

    async def ask(self, connection: int, tokens: int, streamed: bool) -> float:
        """Send a request and read its answer; seconds until its first tokens have come."""
        reader, writer = self._streams[connection]
        body = json.dumps({
            "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "logprobs": LOGPROBS,
            "stream": streamed, "ignore_eos": True,
        }).encode()  # fmt: skip
        began = time.perf_counter()
        writer.write(
            f"POST {PATH} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise BenchError(f"the server answered {head.splitlines()[0].decode()}")
        if not streamed:
            answer = json.loads(await reader.readexactly(_content_length(head)))
            _check(answer["usage"]["completion_tokens"], tokens)
            return time.perf_counter() - began
        first, last = 0.0, b""
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size + 2)
            first = first or time.perf_counter() - began
            last = chunk if b"finish_reason" in chunk else last
        await reader.readline()
        return first

    async def close(self) -> None:
        for _, writer in self._streams:
            writer.close()
            await writer.wait_closed()


def _content_length(head: bytes) -> int:
    return next(
        int(line.split(b":")[1])
        for line in head.lower().splitlines()
        if line.startswith(b"content-length")
    )


def _check(count: int, tokens: int) -> None:
    if count != tokens:
        raise BenchError(f"an answer has {count} tokens instead of {tokens}")


class EngineAlone:
    """The engine, asked as an asyncio program asks it; nothing makes text of its records."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._number = engine, 0

    async def ask(self, connection: int, tokens: int, streamed: bool) -> float:
        """Run a request; seconds until its first tokens, or, if it is not streamed, its last."""
        self._number += 1
        params = SamplingParams(max_tokens=tokens, logprobs=LOGPROBS)
        ids = tuple(byte_tokens.encode(PROMPT))
        request = Request(id=str(self._number), prompt_token_ids=ids, params=params)
        began, first, count = time.perf_counter(), 0.0, 0
        async for record in self._engine.stream(request):
            first = first or time.perf_counter() - began
            count += len(record.token_ids)
        _check(count, tokens)
        return first if streamed else time.perf_counter() - began


def run(quick: bool) -> list[Comparison]:
    """Measure both loads, in turn."""
    return asyncio.run(_run(3 if quick else 9))


async def _run(rounds: int) -> list[Comparison]:
    options = ("--slots", str(CONNECTIONS), "--max-length", str(MAX_LENGTH), "--drafter", "none")
    config = EngineConfig(
        vocab_size=byte_tokens.VOCAB_SIZE,
        num_slots=CONNECTIONS,
        max_length=MAX_LENGTH,
        drafter="none",
    )
    with served(*options) as (host, port, pid), Engine(config) as engine:
        connections = await Connections.opened(host, port)
        asks: dict[str, Ask] = {ENGINE: EngineAlone(engine).ask, SERVER: connections.ask}
        try:
            return [
                await _measure(asks, pid, rounds, STREAMED, 1, streamed=True),
                await _measure(asks, pid, rounds, SHORT, EACH, streamed=False),
            ]
        finally:
            await connections.close()


async def _measure(
    asks: dict[str, Ask], pid: int, rounds: int, tokens: int, each: int, *, streamed: bool
) -> Comparison:
    loads: dict[str, list[Load]] = {name: [] for name in asks}
    for number in range(rounds + 1):  # the first one is not counted
        for name, ask in asks.items():
            before = cpu_seconds(pid)
            load = await load_of(ask, tokens, each, streamed)
            load.server_cpu = cpu_seconds(pid) - before
            if number:
                loads[name].append(load)
    count = CONNECTIONS * each
    kind = "streams" if streamed else "short requests"
    title = f"{count} {kind} of {tokens} tokens over {CONNECTIONS} connections"
    samples = {name: [load.seconds / count for load in found] for name, found in loads.items()}
    figures = {name: figures_of(found, count) for name, found in loads.items()}
    settings = {"tokens": tokens, "requests": count, "logprobs": LOGPROBS, "rounds": rounds}
    return replace(from_samples(title, samples, settings=settings), figures=figures)


def figures_of(loads: list[Load], count: int) -> dict[str, float]:
    """What is counted of a contender's rounds, beside the time of a request."""
    firsts = np.concatenate([load.firsts for load in loads])
    seconds, own, server = (
        float(np.median([getattr(load, name) for load in loads]))
        for name in ("seconds", "own_cpu", "server_cpu")
    )
    return {
        "requests/s": count / seconds,
        "ms to the first tokens, p50": 1e3 * float(np.percentile(firsts, 50)),
        "p99": 1e3 * float(np.percentile(firsts, 99)),
        "ms of CPU a request here": 1e3 * own / count,
        "ms of CPU a request in the server": 1e3 * server / count,
    }


def cpu_seconds(pid: int) -> float:
    """What a process has taken of all cores, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
