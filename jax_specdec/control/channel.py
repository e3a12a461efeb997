"""Both ends of the control plane: an engine's, or a lead's to its followers, and theirs.

One ROUTER socket serves all processes. A command gets the next number of its link and is kept until
the other side has said that it took it. What cannot be sent now waits here: no call ever blocks,
whatever a worker does. Where a command is lost (a connection over TCP that broke), the worker's
next heartbeat says so, and everything from there on is sent again; a worker drops what it has.

There, a thread of its own takes the commands, in the order of their numbers, and sends the
heartbeats, so that both go on whatever the main thread does: a compilation and a wait for a device
leave Python to others.

https://rfc.zeromq.org/spec/28/ (ROUTER), https://rfc.zeromq.org/spec/26/ (CURVE)
"""

import collections
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jax_specdec.control.commands import Command, Connection, ControlError, Shutdown, from_bytes
from jax_specdec.control.heartbeat import BEAT_SECONDS, Heartbeat, ProcessStats
from jax_specdec.control.socket_path import SocketAddress

BESIDE_MS = 250  # between two calls of `beside`


class ControlClient:
    """Takes commands and sends heartbeats until the process ends.

    Attributes:
      commands: what was taken, in order. A `Shutdown` follows what is no command.
      stats: what the heartbeats say.
      beside: called four times a second at least, by the thread that sends the heartbeats.
    """

    def __init__(self, connection: Connection, stats: ProcessStats) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.stats = stats
        self.beside: Callable[[], None] = lambda: None
        self._connection = connection
        self.taken = 0
        self.missing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        stats.told = self._told

    def start(self) -> None:
        """Begin, in a thread that does not keep the process alive."""
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def _told(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        import zmq

        # Neither is ever closed: the thread ends with the process, and must not hold that up.
        socket = zmq.Context().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt_string(zmq.IDENTITY, self._connection.identity)
        if self._connection.server_key:
            public_key, secret_key = zmq.curve_keypair()
            socket.setsockopt_string(zmq.CURVE_SERVERKEY, self._connection.server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        # Not closed either: a connection that broke is made again.
        address = SocketAddress(self._connection.address)
        socket.connect(address.text)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        due = time.monotonic()
        while True:
            woken = dict(poller.poll(BESIDE_MS))
            if self._wake in woken:
                os.eventfd_read(self._wake)
            if socket in woken:
                self._receive(socket, zmq)
            now = time.monotonic()
            if woken or now >= due:
                due = now + BEAT_SECONDS
                heartbeat = self.stats.now(self.taken, self.missing)
                try:
                    socket.send(heartbeat.to_bytes(), zmq.NOBLOCK)
                except zmq.Again:  # nobody reads; later heartbeats say the same
                    pass
                else:
                    self.missing = False
            self.beside()

    def _receive(self, socket: Any, zmq: Any) -> None:
        """Take every command that is here."""
        while True:
            try:
                number, payload = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.take(int.from_bytes(number, "little"), payload)

    def take(self, number: int, payload: bytes) -> None:
        """Take a command if it is the next one; drop one that was sent again."""
        if number > self.taken + 1:
            self.missing = True
        if number != self.taken + 1:
            return
        self.taken = number
        try:
            self.commands.put(from_bytes(payload))
        except ControlError as error:
            print(error, file=sys.stderr, flush=True)
            self.commands.put(Shutdown())


if TYPE_CHECKING:
    import zmq

RESEND_SECONDS = 1.0  # a heartbeat that lacks a command sent before that says that it is lost
NUMBER_BYTES = 8
MAX_BEAT_BYTES = 1 << 16  # whoever sends more is disconnected
HEARD_AT_ONCE = 256  # heartbeats; a process that sends them without end holds nobody up


class Link:
    """The commands to one process, and its heartbeats.

    Attributes:
      identity: the process's name at the socket; nobody else knows it.
      heartbeat: its last heartbeat.
      numbered: commands that it was told so far.
    """

    def __init__(self, server: "ControlServer", identity: str) -> None:
        self.identity = identity
        self.heartbeat = Heartbeat()
        self.numbered = 0
        self._server = server
        self.unacknowledged: collections.deque[bytes] = collections.deque()  # not acknowledged
        self.num_sent = 0  # the number of the first command that was not sent yet
        self._sent_at = 0.0

    def tell(self, payload: bytes) -> int:
        """Send a command, now or as soon as that is possible; returns its number, from 1.

        The command was taken once `heartbeat.taken` has reached the number.
        """
        with self._server._lock:
            self.numbered += 1
            self.unacknowledged.append(payload)
            self._server._push(self)
            return self.numbered

    @property
    def connection(self) -> Connection:
        """The connection by which the process gets its commands."""
        server = self._server
        key = server._public_key.decode()
        return Connection(address=server._address, identity=self.identity, server_key=key)

    def close(self) -> None:
        """Forget the commands that were not taken; nothing more is sent or heard."""
        with self._server._lock:
            self.unacknowledged.clear()
            self._server._links.pop(self.identity.encode(), None)


class ControlServer:
    """A bound socket and the links over it; any thread may use it."""

    def __init__(self, address: str = "", *, folder: Path | None = None) -> None:
        """Note where to listen; the socket is made with the first link.

        Args:
          address: as ZeroMQ writes it, such as "tcp://10.0.0.1:*"; over TCP everything is encrypted
            with CURVE, under a key that is made for this server. Empty, or "ipc://*": a socket in
            `folder`. A path may be longer than Linux takes one (`SocketPath`).
          folder: a directory that only this user may enter.

        Raises:
          ValueError: neither an address nor a folder.
        """
        if not address and folder is None:
            raise ValueError("a control server needs an address, or a folder for its socket")
        if folder is not None and address in ("", "ipc://*"):
            address = f"ipc://{folder}/{os.urandom(4).hex()}"
        self._address = address
        self._links: dict[bytes, Link] = {}
        self._lock = threading.RLock()
        self._public_key = b""
        self._zmq: ModuleType | None = None
        self._context: zmq.Context | None = None
        self._socket: zmq.Socket | None = None
        self._bound: SocketAddress | None = None

    def link(self) -> Link:
        """A link for one more process, which connects with `Link.connection`."""
        with self._lock:
            self._open()
            link = Link(self, os.urandom(16).hex())
            self._links[link.identity.encode()] = link
            return link

    def pump(self) -> None:
        """Take the heartbeats that have come, and send what had to wait; never blocks."""
        with self._lock:
            if self._socket is None or self._zmq is None:
                return
            with contextlib.suppress(self._zmq.Again):
                for _ in range(HEARD_AT_ONCE):
                    self.hear(*self._socket.recv_multipart(self._zmq.NOBLOCK))
            for link in self._links.values():
                self._push(link)

    def ready(self) -> bool:
        """Whether `pump` would hear something now."""
        with self._lock:
            if self._socket is None or self._zmq is None:
                return False
            return bool(self._socket.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN)

    try_receive = pump  # for `ipc.wait_readable`

    def fileno(self) -> int:
        """A descriptor that becomes readable when something comes. Ask `ready` before each wait."""
        assert self._socket is not None
        assert self._zmq is not None
        return int(self._socket.getsockopt(self._zmq.FD))

    def close(self) -> None:
        """Close the socket; what was not sent is dropped. Calling it again does nothing."""
        with self._lock:
            socket, self._socket = self._socket, None
            context, self._context = self._context, None
            if socket is not None:
                socket.close(linger=0)
            if context is not None:
                context.term()
            bound, self._bound = self._bound, None
            if bound is not None:
                bound.close()

    def _open(self) -> None:
        if self._socket is not None:
            return
        import zmq  # an engine's users pay for it once a worker is started

        self._zmq = zmq
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BEAT_BYTES)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or it would drop what nobody takes
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a process may connect again
            if not self._address.startswith("ipc://"):
                self._public_key, secret_key = zmq.curve_keypair()
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
            self._bound = SocketAddress(self._address)
            socket.bind(self._bound.text)
            if self._bound.text == self._address:
                self._address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except (zmq.ZMQError, OSError) as error:
            socket.close(linger=0)
            self.close()
            raise OSError(
                error.errno,
                f"the control socket cannot listen at {self._address!r} ({error}): choose another "
                "address, or for a socket file a directory with a shorter path",
            ) from error
        self._socket = socket

    def hear(self, identity: bytes, *parts: bytes) -> None:
        """Take one heartbeat; of an unknown process, or what is none, nothing is kept."""
        link = self._links.get(identity)
        if link is None or len(parts) != 1:
            return
        try:
            heartbeat = Heartbeat.from_bytes(parts[0], link.heartbeat.beats + 1)
        except ValueError:
            return
        if not link.heartbeat.taken <= heartbeat.taken <= link.numbered:
            return
        for _ in range(heartbeat.taken - link.heartbeat.taken):
            link.unacknowledged.popleft()
        link.heartbeat = heartbeat
        late = time.monotonic() - link._sent_at > RESEND_SECONDS
        if heartbeat.missing or (heartbeat.taken < link.num_sent and late):
            link.num_sent = heartbeat.taken
        link.num_sent = max(link.num_sent, heartbeat.taken)

    def _push(self, link: Link) -> None:
        """Send what waits, as far as that is possible now; nothing before the first heartbeat."""
        if link.num_sent == link.numbered or not link.heartbeat.beats or self._socket is None:
            return
        assert self._zmq is not None
        with contextlib.suppress(self._zmq.ZMQError):  # full, or not connected now
            while link.num_sent < link.numbered:
                payload = link.unacknowledged[link.num_sent - link.heartbeat.taken]
                number = (link.num_sent + 1).to_bytes(NUMBER_BYTES, "little")
                self._socket.send_multipart(
                    (link.identity.encode(), number, payload), self._zmq.NOBLOCK
                )
                link.num_sent += 1
                link._sent_at = time.monotonic()
