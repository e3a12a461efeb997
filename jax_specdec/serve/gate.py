"""Checks before anything else of a request is read, and counts of all."""

import collections
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jax_specdec.serve.bounds import MAX_HEAD, MAX_HEADERS, MAX_URL, Bounds, host_name
from jax_specdec.serve.errors import MAX_SHOWN, ApiError

logger = logging.getLogger("jax_specdec.serve")
OTHER = "other"  # every path that is not served, and what was no request


class Traffic:
    """Numbers of a server's requests and connections.

    Attributes:
      answers: by path and status.
      connections: those that are open.
      ended: connections that the server ended, by its reason.
    """

    def __init__(self) -> None:
        self.answers: collections.Counter[tuple[str, int]] = collections.Counter()
        self.connections = 0
        self.ended: collections.Counter[str] = collections.Counter()


class Gate:
    """An application behind the checks of a request's head; counts what it answers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        bounds: Bounds,
        traffic: Traffic,
        paths: frozenset[str],
        log: bool = False,
    ) -> None:
        """Stand before `app`.

        Args:
          paths: those that are counted by their names.
          log: log a line for each answer.
        """
        self._app, self._bounds, self._traffic, self._paths = app, bounds, traffic, paths
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else OTHER
        status, began = 0, time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            error = refusal(scope, self._bounds)
            answer = self._app
            if error is not None:  # behind it, the connection ends
                answer = JSONResponse(error.body, error.status, {"connection": "close"})
            await answer(scope, receive, counted)
        finally:
            self._traffic.answers[path, status or 500] += 1
            if self._log:
                logger.info(access_line(scope, status, time.monotonic() - began))


def refusal(scope: Mapping[str, object], bounds: Bounds) -> ApiError | None:
    """The fault of a request's head; None where it may come in."""
    raw = scope.get("raw_path") or str(scope["path"]).encode()
    query = scope.get("query_string", b"")
    assert isinstance(raw, bytes)
    assert isinstance(query, bytes)
    if (size := len(raw) + len(query)) > MAX_URL:
        return too_long(size)
    headers = scope["headers"]
    assert isinstance(headers, list)
    size = len(raw) + len(query) + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEAD or len(headers) > MAX_HEADERS:
        return too_large(size, len(headers))
    names = {name for name, _ in headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        # Servers in a row may take the body's end from either: what one of them holds for a part of
        # it is the next one's request (RFC 9112, 6.3).
        return ApiError(
            400,
            "the request has both Content-Length and Transfer-Encoding: send one of them, on a new "
            "connection",
        )
    hosts = bounds.allowed_hosts
    if hosts is None:
        return None
    host = next((value for name, value in headers if name == b"host"), b"").decode("latin-1")
    # Browsers always send it, so no page's name is behind one that HTTP/1.0 leaves out.
    nameless = b"host" not in names and scope.get("http_version") == "1.0"
    if nameless or host_name(host) in hosts:
        return None
    return ApiError(
        421,
        f"the server is not called {host[:256]!r}: use one of its names, or start it with "
        "--allowed-host NAME (* for any)",
        code="host_not_allowed",
    )


def access_line(scope: Mapping[str, Any], status: int, seconds: float) -> str:
    """The line of an answer: who asked for what, the status (0: none was sent), and how long."""
    host, port = scope.get("client") or ("unknown", 0)
    client = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = str(scope["path"])[:MAX_SHOWN]
    shown = path.encode("unicode_escape").decode("ascii")  # in one line, whatever it holds
    return f"{client} {scope['method']} {shown} {status} {seconds:.3f} s"


def too_long(size: int) -> ApiError:
    """The error of a URL of `size` bytes or more."""
    return ApiError(
        414, f"the URL has {size} bytes and may have {MAX_URL}: values go into the body"
    )


def too_large(size: int, count: int | None = None) -> ApiError:
    """The error of a head of `size` bytes or more, with so many headers where they are known."""
    counted = "" if count is None else f"{count} headers, and "
    return ApiError(
        431,
        f"the head of the request has {counted}{size} bytes and may have {MAX_HEADERS} headers and "
        f"{MAX_HEAD} bytes: leave some out",
        code="too_large",
    )
