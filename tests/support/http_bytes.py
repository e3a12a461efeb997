"""Requests as bytes on a connection: what no client library would send, or leave unread."""

import contextlib
import json
import socket
from urllib.parse import urlsplit

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextlib.contextmanager
def connected(server, *sent, receive_buffer=None):
    """A connection on which something was sent."""
    address = urlsplit(server.url)
    with socket.socket() as link:
        if receive_buffer is not None:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        link.settimeout(30)
        link.connect((address.hostname, address.port))
        for part in sent:
            link.sendall(part)
        yield link


def received(link, enough=lambda data: False):
    """What comes until the connection ends, or is enough."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while not enough(data) and (part := link.recv(1 << 16)):
            data += part
    return data


def with_length(length, *headers, post=POST):
    return post + b"".join(headers) + b"content-length: %d\r\n\r\n" % length


def of_body(body, *headers, post=POST):
    content = json.dumps(body).encode()
    return with_length(len(content), *headers, post=post) + content
