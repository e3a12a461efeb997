"""The end of the control plane that takes commands: a worker's, or a follower's.

A thread of its own takes the commands, in the order of their numbers, and sends the heartbeats, so
that both go on whatever the main thread does: a compilation and a wait for a device leave Python to
others.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable

from jax_specdec.control.commands import Command, Connection, ControlError, Shutdown, from_bytes
from jax_specdec.control.heartbeat import BEAT_SECONDS, ProcessStats

LOOK_MS = 250  # between two calls of `beside`


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
        self._taken = 0
        self._missing = False
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
        socket.connect(self._connection.address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        due = time.monotonic()
        while True:
            woken = dict(poller.poll(LOOK_MS))
            if self._wake in woken:
                os.eventfd_read(self._wake)
            if socket in woken:
                self._receive(socket, zmq)
            now = time.monotonic()
            if woken or now >= due:
                due = now + BEAT_SECONDS
                heartbeat = self.stats.now(self._taken, self._missing)
                try:
                    socket.send(heartbeat.to_bytes(), zmq.NOBLOCK)
                except zmq.Again:  # nobody reads; later heartbeats say the same
                    pass
                else:
                    self._missing = False
            self.beside()

    def _receive(self, socket, zmq) -> None:  # type: ignore[no-untyped-def]
        """Take every command that is here."""
        while True:
            try:
                number, payload = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(int.from_bytes(number, "little"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        """Take a command if it is the next one; drop one that was sent again."""
        if number > self._taken + 1:
            self._missing = True
        if number != self._taken + 1:
            return
        self._taken = number
        try:
            self.commands.put(from_bytes(payload))
        except ControlError as error:
            print(error, file=sys.stderr, flush=True)
            self.commands.put(Shutdown())
