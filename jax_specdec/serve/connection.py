"""One connection of HTTP, with limits on what has not come yet and on what is not read.

uvicorn and h11 speak HTTP; h11 bounds a head that is not complete
(`h11_max_incomplete_event_size`). What is complete is checked in `gate.py`.
"""

import asyncio
import collections
import http
import json
import socket
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jax_specdec.serve.bounds import MAX_HEAD, MAX_URL, Bounds
from jax_specdec.serve.errors import ApiError
from jax_specdec.serve.gate import OTHER, Traffic, too_large, too_long

# Of reading requests in one round of the event loop: answers are sent between two of them.
TURN_SECONDS = 0.002
CLIENT_ASK_SECONDS = 0.2  # after which a client that sends no more is asked whether it is there
EVENTS = "events"  # in a request's state: a stream of events answers it


class Connections:
    """The connections of a server.

    Attributes:
      bounds: of each, and of their number.
      traffic: where they are counted.
      receiving: those whose next request has not come whole, in the order of their wait.
    """

    def __init__(
        self, bounds: Bounds, traffic: Traffic, turn_seconds: float = TURN_SECONDS
    ) -> None:
        self.bounds, self.traffic, self._turn_seconds = bounds, traffic, turn_seconds
        self.receiving: dict[ServerConnection, None] = {}
        self._unread: collections.deque[ServerConnection] = collections.deque()
        self._reads = False  # in the next round of the event loop

    def let_read(self, connection: "ServerConnection") -> None:
        """Let a connection read what has come, once those before it have."""
        self._unread.append(connection)
        self._go_on(connection.loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._unread and not self._reads:
            self._reads = True
            loop.call_soon(self._read, loop)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        self._reads = False
        end = time.monotonic() + self._turn_seconds
        try:
            self._unread.popleft().read()
            while self._unread and time.monotonic() < end:
                self._unread.popleft().read()
        finally:
            self._go_on(loop)


def _send_at_once(transport: asyncio.Transport) -> None:
    """Let no part of an answer wait for the client's acknowledgement of the one before it.

    asyncio does so for sockets of protocol 6 only, and a listening socket may have 0. Then a client
    that acknowledges late (40 ms) gets each answer on a kept connection so much later.
    """
    link = transport.get_extra_info("socket")
    if link is not None and link.family in (socket.AF_INET, socket.AF_INET6):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class ServerConnection(H11Protocol):
    """A connection that ends where its client sends too slowly, or does not read.

    Where more are open than may, the one ends from which a request has been awaited for the longest
    time: so nobody keeps others out by connections that bring none.
    """

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = connections
        self._awaits: object = None  # the state of HTTP that `_timer` is for
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refused = False
        self._half_closed = False  # the client sends no more
        self._asks: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, and make room for it."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` says that something is not read
        _send_at_once(transport)
        bounds, traffic = self._all.bounds, self._all.traffic
        traffic.connections += 1
        self._look()
        if traffic.connections > bounds.max_connections:
            longest = next(iter(self._all.receiving))
            if longest is self:
                self.refuse(
                    ApiError(
                        503,
                        f"{bounds.max_connections} connections are open, as many as may "
                        "(--max-connections): try again later",
                        code="too_many_connections",
                    )
                )
            else:
                longest.end("room")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        super().connection_lost(exc)
        self._all.traffic.connections -= 1
        self._all.receiving.pop(self, None)
        for timer in (self._timer, self._unread, self._asks):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Take what has come, and no more before it was read."""
        if not self._refused:
            self.transport.pause_reading()
            super().data_received(data)

    def handle_events(self) -> None:
        """Wait for a turn to read what has come."""
        self._all.let_read(self)

    def read(self) -> None:
        """Read what has come."""
        if self._refused or self.transport.is_closing():
            return
        super().handle_events()
        if self._half_closed and not self._answers:
            self.transport.close()
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self._look()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on where the client sends no more, but may still read the answers that it awaits.

        One that has left altogether looks the same, so it is asked.
        """
        if self._half_closed:
            return True
        if self._refused or not self._answers or self.conn.their_state is h11.SEND_BODY:
            return False
        self._half_closed = True
        self._asks = self.loop.call_later(CLIENT_ASK_SECONDS, self._ask, CLIENT_ASK_SECONDS)
        return True

    @property
    def _answers(self) -> bool:
        """Whether a request is answered now."""
        return self.cycle is not None and not self.cycle.response_complete

    def _ask(self, seconds: float) -> None:
        """Send what means nothing: the system of a client that has left refuses it.

        That is noticed with the next write. Before an answer begins, it is an interim one (100
        Continue), and in a stream of events a comment; HTTP/1.0 knows neither.
        """
        if self.transport.is_closing() or not self._answers:
            return
        state = self.conn.our_state
        interim: h11.Event | None = None
        if state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            interim = h11.InformationalResponse(status_code=100, headers=[])
        elif state is h11.SEND_BODY and self.scope["state"].get(EVENTS):
            interim = h11.Data(data=b":\n\n")
        if interim is not None:
            self.transport.write(self.conn.send(interim) or b"")
        self._asks = self.loop.call_later(seconds, self._ask, 2 * seconds)

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        seconds = self._all.bounds.client_timeout
        self._unread = self.loop.call_later(seconds, self.end, "not read")

    def resume_writing(self) -> None:
        """Note that everything was read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or a head that is too large."""
        sent, _ = self.conn.trailing_data
        if len(sent) <= MAX_HEAD:
            self.refuse(ApiError(400, msg))
        elif b"\n" not in sent[:MAX_URL]:
            self.refuse(too_long(len(sent)))
        else:
            self.refuse(too_large(len(sent)))

    def refuse(self, error: ApiError) -> None:
        """Answer with an error where that can be done, and end soon."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            reason = http.HTTPStatus(error.status).phrase
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self._all.traffic.answers[OTHER, error.status] += 1
        self._refused = True
        self._wait(self._all.bounds.linger)

    def end(self, reason: str) -> None:
        """End at once, whatever was not sent."""
        self._all.receiving.pop(self, None)
        self._all.traffic.ended[reason] += 1
        self.transport.abort()

    def _look(self) -> None:
        """Note what the client has to send now, and give it some time for a head.

        `Bodies` has the time of a body, unless the request is answered before it has come.
        """
        if self._refused:
            return
        theirs = self.conn.their_state
        if theirs in (h11.IDLE, h11.SEND_BODY):
            self._all.receiving.setdefault(self)
        else:
            self._all.receiving.pop(self, None)
        answered = self.cycle is not None and self.cycle.response_complete
        if (awaits := (theirs, self.cycle, answered)) != self._awaits:
            self._awaits = awaits
            bounds = self._all.bounds
            if answered and theirs is h11.SEND_BODY:  # the rest of a body that nobody reads
                self._wait(bounds.linger)
            else:
                self._wait(bounds.client_timeout if theirs is h11.IDLE else None)

    def _wait(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        sent, _ = self.conn.trailing_data
        if self._refused or not sent or self.conn.their_state is not h11.IDLE:
            self.transport.close()
            return
        seconds = self._all.bounds.client_timeout
        self.refuse(
            ApiError(408, f"the head of the request did not come in {seconds:g} seconds "
                     "(--client-timeout)")
        )  # fmt: skip
