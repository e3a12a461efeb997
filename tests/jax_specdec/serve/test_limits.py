"""What a client may send, hold and leave unread before it loses its place."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import threading
from types import SimpleNamespace

import httpx
import pytest

from jax_specdec.serve import connection
from jax_specdec.serve.bounds import MAX_HEAD, MAX_HEADERS, MAX_URL, Bounds
from jax_specdec.serve.gate import Traffic
from jax_specdec.serve.runs import PART
from tests.support.http_bytes import HEALTH, connected, of_body, received, with_length
from tests.support.http_server import MAX_LENGTH, MODEL, Encoder, WaitingWorker, serving, until

BODY = {"prompt": "abc", "max_tokens": 3}
JSON = {"content-type": "application/json"}
FOR_EVER = 3600.0


@pytest.fixture(scope="module")
def keyed():
    with serving(api_key="secret", bounds=Bounds(linger=0.1)) as server:
        yield server


def status(data):
    return int(data.split()[1])


def check_refused(data, expected, said):
    """Check the status of an answer that is all of `data`, and what its error says."""
    assert status(data) == expected
    assert said in json.loads(data.partition(b"\r\n\r\n")[2])["error"]["message"]


def of_size(size):
    """A body of so many bytes."""
    body = json.dumps(BODY | {"user": ""}).encode()
    return body.replace(b'"user": ""', b'"user": "' + b"x" * (size - len(body)) + b'"')


def is_answer(data):
    """Whether an answer with a length is complete."""
    head, end, body = data.partition(b"\r\n\r\n")
    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return bool(end) and bool(length) and len(body) >= int(length[0].split(b":")[1])


@pytest.mark.parametrize(
    ("head", "expected", "said"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD + 1), 431, f"may have {MAX_HEADERS} headers"),
        (b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * MAX_HEAD, 431, f"{MAX_HEAD} bytes"),
        (b"GET /" + b"a" * (MAX_HEAD + 1), 414, f"may have {MAX_URL}"),
        (b"\x16\x03\x01\x02\r\n\r\n", 400, "Invalid HTTP request"),
    ],
)
def test_a_head_is_refused_while_it_comes(keyed, head, expected, said):
    with connected(keyed, head) as link:
        check_refused(received(link), expected, said)  # and the connection ends


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/health", {"x": "a" * (MAX_HEAD - 100)}, 431),
        ("/health", {f"x{n}": "a" for n in range(MAX_HEADERS)}, 431),
        ("/" + "a" * MAX_URL, {}, 414),
        ("/health?" + "a" * MAX_URL, {}, 414),
        ("/health", {"x": "a" * (MAX_HEAD - 500)}, 200),
        ("/health?" + "a" * (MAX_URL - 10), {f"x{n}": "a" for n in range(MAX_HEADERS - 10)}, 200),
    ],
)
def test_a_head_that_came_whole_is_refused(keyed, path, headers, expected):
    """In one piece, which the parser takes, and before the key is looked at."""
    answer = httpx.get(keyed.url + path, headers=headers, timeout=60)
    assert answer.status_code == expected
    if expected != 200:
        assert answer.json()["error"]["message"].endswith(("leave some out", "into the body"))


def test_heads_and_bodies_must_come_in_time():
    late = "did not come in 0.2 seconds (--client-timeout)"
    with serving(bounds=Bounds(client_timeout=0.2, linger=0.1)) as server:
        for sent in (HEALTH[:20], with_length(100) + b"{"):
            with connected(server, sent) as link:
                check_refused(received(link), 408, late)  # and it ends
        with connected(server) as link:
            assert received(link) == b""
        with connected(server, HEALTH) as link:
            assert status(received(link, is_answer)) == 200
            link.sendall(HEALTH[:9])  # a second head must come in time, too
            assert status(received(link)) == 408
        until(lambda: server.service.traffic.connections == 0)


def test_a_body_of_another_size_than_it_may_have_is_refused():
    """At once where it is announced as too large, and else once it is."""
    computed = (1 << 20) + 64 * MAX_LENGTH  # it follows from the length of a request
    given = Bounds(max_body=1000, client_timeout=FOR_EVER)
    for bounds, most in ((given, 1000), (Bounds(), computed)):
        with serving(bounds=bounds) as server:
            with connected(server, with_length(most + 1)) as link:
                said = f"more than {most} bytes (--max-body)"
                check_refused(received(link, is_answer), 413, said)
            for size, expected in ((most, 200), (most + 1, 413)):
                for content in (of_size(size), iter([of_size(size)])):  # the other has no length
                    answer = server.http.post("/v1/completions", content=content, headers=JSON)
                    assert answer.status_code == expected


def test_strangers_are_refused_before_their_body(keyed):
    """And what they go on to send is taken for a moment only."""
    with connected(keyed, with_length(10**12)) as link:
        assert status(received(link, is_answer)) == 401
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(3000):
                link.sendall(b" " * 1000)
                threading.Event().wait(0.01)
            pytest.fail("it is taken for ever")


def test_a_refused_body_does_not_end_the_connection(keyed):
    with connected(keyed, of_body(BODY)) as link:
        assert status(received(link, is_answer)) == 401
        link.sendall(of_body(BODY, b"authorization: Bearer secret\r\n"))
        assert status(received(link, is_answer)) == 200


def test_connections_that_bring_no_request_make_room_for_others():
    bounds = Bounds(max_connections=3, client_timeout=FOR_EVER)
    with serving(bounds=bounds, api_key="secret") as server, contextlib.ExitStack() as open_:
        halves = [open_.enter_context(connected(server, HEALTH[:7])) for _ in range(3)]
        until(lambda: server.service.traffic.connections == 3)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert received(halves[0]) == b""  # the first one made room
        halves[1].sendall(HEALTH[7:])
        assert status(received(halves[1], is_answer)) == 200
        page = httpx.get(f"{server.url}/metrics").text
        assert 'jax_specdec_http_ended_connections_total{reason="room"}' in page


def test_a_connection_is_refused_where_all_others_are_answered():
    bounds = Bounds(max_connections=2, client_timeout=FOR_EVER, linger=0.1)
    with serving(bounds=bounds, worker=WaitingWorker) as server, contextlib.ExitStack() as open_:
        for _ in range(2):
            open_.enter_context(connected(server, of_body(BODY)))
        until(lambda: server.service.num_open == 2)
        with connected(server) as link:
            said = "2 connections are open, as many as may (--max-connections)"
            check_refused(received(link), 503, said)
        server.workers[0].allowed.release(1000)


def test_bodies_are_bounded_and_the_slowest_makes_room():
    bounds = Bounds(max_body=1000, client_timeout=FOR_EVER)
    with serving(bounds=bounds) as server, contextlib.ExitStack() as open_:
        part, bodies = of_size(950), server.service.bodies
        links = []
        for count in range(1, 9):
            sent = with_length(len(part)), part[:-1]
            links.append(open_.enter_context(connected(server, *sent)))
            until(lambda n=count: bodies.num_bytes == n * (len(part) - 1))
        links.append(open_.enter_context(connected(server, with_length(999), b"x" * 998)))
        check_refused(received(links[0], is_answer), 429, "send it once more")
        until(lambda: bodies.num_bytes == 7 * (len(part) - 1) + 998)
        links[1].sendall(part[-1:])
        assert status(received(links[1], is_answer)) == 200
        until(lambda: bodies.num_bytes == 6 * (len(part) - 1) + 998)
    assert not server.service.bodies.coming


class SeenEncoder(Encoder):
    """Notes the threads in which bodies are read, and refuses two at once."""

    def __init__(self):
        self.threads, self.running = [], threading.Semaphore(1)

    def encode(self, text):
        assert self.running.acquire(blocking=False), "two are read at once"
        self.threads.append(threading.current_thread().name)
        threading.Event().wait(0.01)  # others would come meanwhile
        self.running.release()
        return super().encode(text)


def test_large_bodies_are_read_outside_the_event_loop():
    seen = dataclasses.replace(MODEL, encoder=SeenEncoder())
    with serving(model=seen) as server:
        answers = [server.ask_later(**BODY, user="x" * (2 * PART)) for _ in range(8)]
        assert [one.result(60).status_code for one in answers] == [200] * 8
        assert len(seen.encoder.threads) == 8
        assert server.thread.name not in seen.encoder.threads


# Almost a megabyte: the buffers in between are made smaller.
LARGE = {"prompt": "a" * 60, "prompt_logprobs": 32, "n": 128, "max_tokens": 1}


@pytest.fixture
def narrow():
    bounds = Bounds(client_timeout=0.5, max_prompt_logprobs=10**6, timeout=None)
    with serving(bounds=bounds, send_buffer=4096) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_who_does_not_read_loses_its_place(narrow, stream):
    with connected(narrow, of_body(LARGE | {"stream": stream}), receive_buffer=4096) as link:
        until(lambda: narrow.service.num_open == 1)
        until(lambda: narrow.service.num_open == 0)
        assert narrow.service.traffic.ended["not read"] == 1
        with contextlib.suppress(ConnectionResetError):
            assert not received(link).endswith((b"\r\n0\r\n\r\n", b"[DONE]\n\n"))
    until(lambda: not narrow.engine.running)


def test_a_reader_who_leaves_a_rest_loses_its_connection(narrow):
    """Less than what a transport keeps without complaint."""
    assert len(narrow.http.get("/openapi.json").content) < 1 << 16
    with connected(narrow, HEALTH.replace(b"health", b"openapi.json"), receive_buffer=4096):
        until(lambda: narrow.service.traffic.ended["not read"] == 1)


def test_a_reader_who_reads_slowly_keeps_its_place():
    """What it reads in the time is no whole answer, and part after part of one."""
    bounds = Bounds(client_timeout=1.0, max_prompt_logprobs=10**6, timeout=None)
    with (
        serving(bounds=bounds, send_buffer=4096) as server,
        connected(server, of_body(LARGE), receive_buffer=1 << 14) as link,
    ):
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            threading.Event().wait(0.01)
            data += (part := link.recv(1 << 13))
            assert part, "the connection has ended"
        assert len(data) > 10 * PART


def test_logprobs_of_prompts_are_bounded_a_request():
    prompt, said = "a" * 60, "a request may ask for 360 (--max-prompt-logprobs)"
    with serving(bounds=Bounds(max_prompt_logprobs=360)) as server:
        for asked, expected in (
            ({"prompt": prompt, "prompt_logprobs": 2, "n": 3}, 200),
            ({"prompt": prompt, "prompt_logprobs": 0, "n": 6}, 200),
            ({"prompt": prompt, "logprobs": 7, "n": 20}, 200),  # of no prompt
            ({"prompt": prompt, "prompt_logprobs": 32, "prompt_logprobs_start": 50}, 200),
            ({"prompt": prompt, "prompt_logprobs": 2, "n": 4}, 400),
            ({"prompt": [prompt] * 4, "prompt_logprobs": 2}, 400),
            ({"prompt": prompt, "logprobs": 7, "echo": True}, 400),
            ({"prompt": prompt, "prompt_logprobs": 0, "n": 7}, 400),
        ):
            answer = server.ask(**asked, max_tokens=1)
            assert (answer.status_code, said in answer.text) == (expected, expected == 400)
        messages = [{"role": "user", "content": prompt}]
        answer = server.ask("chat/completions", messages=messages, prompt_logprobs=2, n=4)
        assert said in answer.text


def test_only_the_servers_own_names_are_served():
    hosts = frozenset({"localhost", "::1", "gpu.example"})
    with serving(bounds=Bounds(allowed_hosts=hosts), api_key="secret") as server:
        for host, expected in (
            ("localhost", 200), ("LOCALHOST:80", 200), ("[::1]:80", 200), ("gpu.example.", 200),
            ("evil.example", 421), ("localhost.evil.example", 421), ("", 421), ("[::2]", 421),
        ):  # fmt: skip
            with connected(server, HEALTH.replace(b"localhost", host.encode())) as link:
                answer = received(link, is_answer)
            assert status(answer) == expected, host
            assert expected == 200 or b"--allowed-host NAME" in answer
        for head, expected in ((b"", 200), (b"host: evil.example\r\n", 421)):
            with connected(server, b"GET /health HTTP/1.0\r\n" + head + b"\r\n") as link:
                assert status(received(link)) == expected  # a probe has no name for it


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0, [1, 2, 3, 4, 4, 4]), (FOR_EVER, [2, 4, 4, 4, 4, 4])]
)
def test_connections_read_in_turns_and_answers_go_between(seconds, expected):
    seen, rounds = [], []

    def read(number):
        seen.append(number)
        if number == 1:
            raise ValueError("it ends nobody's turn but its own")

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        connections = connection.Connections(Bounds(), Traffic(), seconds)
        for number in range(4):
            one = SimpleNamespace(loop=loop, read=functools.partial(read, number))
            connections.let_read(one)
        for _ in expected:
            await asyncio.sleep(0)
            rounds.append(len(seen))

    asyncio.run(main())
    assert rounds == expected
