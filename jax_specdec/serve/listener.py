"""A server of HTTP that ends well: it drains, and says so meanwhile.

uvicorn listens and speaks HTTP (https://www.uvicorn.org).
"""

import contextlib
import socket
from types import FrameType

import uvicorn

from jax_specdec.serve.app import Service

BACKLOG = 2048


class Listener(uvicorn.Server):
    """uvicorn's server: a first signal drains it, a second one ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal; returns when every request has been answered.

        uvicorn raises the signal once more when it has ended: this server has done what it asks.
        """
        with contextlib.suppress(KeyboardInterrupt):
            super().run(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.draining = True
        super().handle_exit(sig, frame)


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
