"""Connections of clients: answers that do not wait, and ends that nothing can hide behind."""

import contextlib
import json
import socket
import time

import httpx
import pytest

from jax_specdec.serve import connection
from jax_specdec.serve.bounds import Bounds
from tests.support.http_bytes import HEALTH, POST, connected, of_body, received
from tests.support.http_server import WaitingWorker, serving, until


@pytest.fixture(scope="module")
def server():
    with serving(bounds=Bounds(linger=0.1)) as made:
        yield made


def answers_to(server, data):
    """All that comes until the server ends the connection."""
    with connected(server, data) as link:
        return received(link)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_accepted_sockets_send_at_once(host):
    """Or each answer on a kept connection waits 40 ms for an acknowledgement."""
    with serving(host=host, bounds=Bounds(allowed_hosts=None)) as made, httpx.Client() as client:
        for _ in range(2):  # the connection is kept
            assert client.get(f"{made.url}/v1/models").status_code == 200
        (kept,) = made.listener.server_state.connections
        link = kept.transport.get_extra_info("socket")
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


CHUNKED = b"transfer-encoding: chunked\r\n"
BODY = b"0\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        POST + b"content-length: 5\r\n" + CHUNKED,
        POST + CHUNKED + b"Content-Length: 5\r\n",
        POST + b"content-length: 0\r\n" + CHUNKED.upper(),
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n" + CHUNKED,
        b"GET /none HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n" + CHUNKED,
    ],
)
def test_two_lengths_of_a_body_end_the_connection(head, server):
    """What lies behind is no request: a proxy before this server may have seen none there."""
    data = answers_to(server, head + b"\r\n" + BODY + HEALTH)
    assert data.startswith(b"HTTP/1.1 400 ")
    assert b"both Content-Length and Transfer-Encoding" in data
    assert (data.count(b"HTTP/1.1 "), b"connection: close" in data.lower()) == (1, True)


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5, 6\r\n",
        b"content-length: +5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 0x5\r\n",
        CHUNKED + CHUNKED,
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: gzip\r\n",
        b"transfer-encoding : chunked\r\n",
        b"transfer-encoding: \x0bchunked\r\n",
        b"x: y\r\n z\r\ntransfer-encoding:\r\n chunked\r\ncontent-length: 5\r\n",
    ],
)
def test_other_doubtful_lengths_end_it_too(lines, server):
    data = answers_to(server, POST + lines + b"\r\n" + BODY + HEALTH)
    assert data.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert data.count(b"HTTP/1.1 ") == 1


def test_a_request_behind_a_good_one_is_answered(server):
    """The control: the same bytes with one length of a body."""
    with connected(server, POST + CHUNKED + b"\r\n" + BODY + HEALTH) as link:
        data = received(link, lambda data: data.count(b"HTTP/1.1 ") == 2)
    assert data.index(b"HTTP/1.1 400 ") < data.index(b"HTTP/1.1 200 ")


def asked(version, **body):
    post = POST.replace(b"1.1", version)
    return of_body({"prompt": "abc", "max_tokens": 3} | body, post=post)


@pytest.fixture
def waiting():
    """A server whose steps a test allows."""
    with serving(worker=WaitingWorker, bounds=Bounds(linger=0.1)) as made:
        yield made


@contextlib.contextmanager
def sent_off(server, data):
    """A connection on which a request was sent, once it is answered."""
    with connected(server, data) as link:
        until(lambda: server.service.num_open == 1)
        yield link


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_reads_gets_its_answer(version, stream, waiting):
    """It has shut down its side; while it waits, it is asked whether it is there."""
    with sent_off(waiting, asked(version, stream=stream)) as link:
        link.shutdown(socket.SHUT_WR)
        time.sleep(2 * connection.CLIENT_ASK_SECONDS)
        waiting.workers[0].allowed.release(100)
        data = received(link)
    head, _, body = data.partition(b" 200 OK")[2].partition(b"\r\n\r\n")
    assert head
    assert (b"100 \r\n" in data) == (version == b"1.1" and not stream)
    if stream:
        assert data.count(b"[DONE]") == 1
        assert b"\n:\n\n" in data.replace(b"\r\n", b"\n")
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 3


def test_pipelined_requests_are_answered(server):
    with connected(server, asked(b"1.1") + HEALTH + HEALTH) as link:
        link.shutdown(socket.SHUT_WR)
        data = received(link)
    assert data.count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_left_altogether_ends_its_request(stream, waiting):
    """Its last words are the same as those of one that only reads."""
    with sent_off(waiting, asked(b"1.1", stream=stream, max_tokens=60)):
        pass
    until(lambda: waiting.service.num_open == 0)
    waiting.workers[0].allowed.release(100)
    until(lambda: not waiting.engine.status[0].request_ids)


def test_half_of_a_body_is_no_request(waiting):
    with connected(waiting, asked(b"1.1")[:-5]) as link:
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1 << 16) == b""
