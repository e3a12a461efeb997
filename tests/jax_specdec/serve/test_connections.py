"""Connections of clients: answers that do not wait, and ends that nothing can hide behind."""

import contextlib
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from jax_specdec.serve.bounds import Bounds
from tests.support.http_server import serving

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    with serving(bounds=Bounds(linger=0.1)) as made:
        yield made


def received(server, *parts):
    """All that comes until the server ends the connection."""
    address, data = urlsplit(server.url), b""
    with socket.create_connection((address.hostname, address.port), 30) as link:
        for part in parts:
            link.sendall(part)
        with contextlib.suppress(ConnectionResetError):
            while more := link.recv(1 << 16):
                data += more
    return data


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_accepted_sockets_send_at_once(host):
    """Or each answer on a kept connection waits 40 ms for an acknowledgement."""
    with serving(host=host, bounds=Bounds(allowed_hosts=None)) as made, httpx.Client() as client:
        for _ in range(2):  # the connection is kept
            assert client.get(f"{made.url}/v1/models").status_code == 200
        (connection,) = made.listener.server_state.connections
        link = connection.transport.get_extra_info("socket")
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
    data = received(server, head + b"\r\n" + BODY + HEALTH)
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
    data = received(server, POST + lines + b"\r\n" + BODY + HEALTH)
    assert data.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert data.count(b"HTTP/1.1 ") == 1


def test_a_request_behind_a_good_one_is_answered(server):
    """The control: the same bytes with one length of a body."""
    address, data = urlsplit(server.url), b""
    with socket.create_connection((address.hostname, address.port), 30) as link:
        link.sendall(POST + CHUNKED + b"\r\n" + BODY + HEALTH)
        while data.count(b"HTTP/1.1 ") < 2:
            data += link.recv(1 << 16)
    assert data.index(b"HTTP/1.1 400 ") < data.index(b"HTTP/1.1 200 ")
