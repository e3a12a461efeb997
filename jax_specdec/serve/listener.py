"""A server of HTTP that ends well: it drains, and says so meanwhile.

uvicorn listens and speaks HTTP (https://www.uvicorn.org).
"""

import contextlib
import functools
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn

from jax_specdec.serve.app import Service
from jax_specdec.serve.bounds import MAX_HEAD
from jax_specdec.serve.connection import Connections, ServerConnection

BACKLOG = 1024  # connections that may wait in the system
_TAKEN = 16  # of them in a round of the event loop, between which answers are sent


class Listener(uvicorn.Server):
    """uvicorn's server: a first SIGTERM, SIGINT or SIGHUP drains it, a second one ends it at once.

    While it drains it listens, and answers that it does.
    """

    def __init__(self, service: Service) -> None:
        bounds = service.bounds
        connections = Connections(bounds, service.traffic)
        super().__init__(
            uvicorn.Config(
                service.app,
                # Those that the limits are made for, even where others are installed.
                http=functools.partial(ServerConnection, connections=connections),  # type: ignore[arg-type]
                loop="asyncio",
                ws="none",
                lifespan="off",
                h11_max_incomplete_event_size=MAX_HEAD,
                backlog=_TAKEN,
                log_config=None,
                log_level="error",  # strangers cause warnings
                access_log=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(bounds.client_timeout) + 1,
            )
        )
        self._service = service
        self._drains_until: float | None = None

    @property
    def ending(self) -> bool:
        """Whether no more requests are taken."""
        return self._service.draining or self.should_exit

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        for listening in sockets or ():  # asyncio has let as many wait as it takes at once
            listening.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGHUP as SIGTERM, where it is not ignored (nohup) and this is the main thread."""
        with super().capture_signals():
            main = threading.current_thread() is threading.main_thread()
            before = signal.getsignal(signal.SIGHUP)
            if not main or before is signal.SIG_IGN:
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or end."""
        if self.ending:
            self.should_exit = self.force_exit = True
        self._service.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; at once after a second signal."""
        if self.force_exit:  # since Python 3.12, a closed server waits for its connections
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Look, ten times a second, whether it may end."""
        if self._service.draining:
            timeout = self._service.bounds.timeout
            if self._drains_until is None and timeout is not None:
                self._drains_until = time.monotonic() + timeout
            late = self._drains_until is not None and time.monotonic() > self._drains_until
            self.should_exit = self.should_exit or late or not self._service.num_open
        return await super().on_tick(counter)


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; of port 0, at a free one.

    Raises:
      OSError: the address cannot be had; names it.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot listen at {host}, port {port} ({error.strerror}): choose another --host or "
            "--port",
        ) from error
