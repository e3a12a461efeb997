"""The suite `load`: what a client counts, against a server and an engine that are scripted."""

import asyncio
import json
import os
import time

import pytest

from bench import load
from bench.timing import BenchError
from tests.support.processor_messages import all_admitted, request, run, target, tokens


def answered(streamed, *, count=4, status="200 OK"):
    """What one request to a scripted server gets, and what was asked."""
    asked = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = load._content_length(head)
        asked.append((head.split(b"\r\n")[0], json.loads(await reader.readexactly(size))))
        if streamed:
            writer.write(f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for data in (b"data: {}\n\n", b'data: {"finish_reason": "length"}\n\n'):
                await asyncio.sleep(0.02)
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            writer.write(b"0\r\n\r\n")
        else:
            body = json.dumps({"usage": {"completion_tokens": count}}).encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
        await writer.drain()
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        link = load.Connections(f"{host}:{port}", [await asyncio.open_connection(host, port)])
        began = time.perf_counter()
        try:
            first = await link.ask(0, 4, streamed)
            return first, time.perf_counter() - began
        finally:
            await link.close()
            server.close()

    return *asyncio.run(ask()), asked


def test_a_stream_is_timed_and_read_to_its_end():
    first, whole, ((line, body),) = answered(streamed=True)
    assert 0.02 <= first <= whole - 0.015
    assert line == b"POST /v1/completions HTTP/1.1"
    assert (body["max_tokens"], body["stream"], body["logprobs"]) == (4, True, load.LOGPROBS)


def test_a_short_request_is_timed_to_its_end():
    first, whole, _ = answered(streamed=False)
    assert 0 < first <= whole


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"count": 3}, "3 tokens instead of 4"), ({"status": "503 Service Unavailable"}, "503")],
)
def test_other_answers_are_not_measured(wrong, words):
    with pytest.raises(BenchError, match=words):
        answered(streamed=False, **wrong)


class ScriptedEngine:
    """Two records for each request, some time apart."""

    async def stream(self, asked):
        state = all_admitted([request("0", logprobs=0, max_tokens=4)])
        _, released = run(state, *(target(i, tokens(5, 6, columns=1)) for i in range(2)))
        for ((record),) in released:
            await asyncio.sleep(0.02)
            yield record


def test_the_engine_alone_is_timed_alike():
    ask = load.EngineAlone(ScriptedEngine()).ask
    assert asyncio.run(ask(0, 4, streamed=True)) >= 0.02
    assert asyncio.run(ask(0, 4, streamed=False)) >= 0.04
    with pytest.raises(BenchError, match="4 tokens instead of 5"):
        asyncio.run(ask(0, 5, streamed=False))


def test_a_load_counts_every_request_and_this_processs_time():
    async def ask(connection, tokens, streamed):
        time.sleep(0.0005)
        return float(connection)

    found = asyncio.run(load.load_of(ask, 8, 2, streamed=False))
    assert sorted(found.firsts) == sorted([*map(float, range(load.CONNECTIONS))] * 2)
    assert 0 <= found.own_cpu <= found.seconds + 0.05
    found.server_cpu = 0.5
    figures = load.figures_of([found], 128)
    assert figures["requests/s"] == pytest.approx(128 / found.seconds)
    assert figures["ms to the first tokens, p50"] == pytest.approx(31_500)
    assert figures["ms of CPU a request in the server"] == pytest.approx(500 / 128)


def test_a_processs_time_grows_as_it_computes():
    before = load.cpu_seconds(os.getpid())
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass
    assert load.cpu_seconds(os.getpid()) - before >= 0.03
