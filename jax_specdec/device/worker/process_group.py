"""Several processes that compute one model: a lead, which talks to the engine, and its followers.

JAX's own runtime connects them (`jax.distributed`), and each has one device of the model's mesh.
The lead sends its followers every command that it carries out, `Advance` among them, so that all
run the same programs in the same order: over a control plane of its own, as the engine does. The
lead alone publishes.

They end together. The kernel kills a follower whose lead has ended; a thread of the lead waits for
each follower, and another one hears their heartbeats: none of them depends on a main thread, which
may hang in a collective.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import jax
import numpy as np

from ipc import RingWriter
from jax_specdec import control

# -P: a file in the current directory must not stand in for a module of the follower.
FOLLOWER = (
    sys.executable, "-P", "-m", "jax_specdec.child", "jax_specdec.device.worker.follower_process"
)  # fmt: skip


class OwnFollower:
    """A child of this process.

    Attributes:
      pid: of its process.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(FOLLOWER, stdin=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        """Say what it is born with."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed by its thread
            self._process.stdin.write(line)  # far less than a pipe holds
            self._process.stdin.flush()  # and stays open: its end is the lead's

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end: its exit status, negative for a signal; None if it did not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None


class PlacedFollower:
    """A process on another node, started by who placed the group.

    On other nodes a lead can start nothing. Whoever placed the group there listens at a socket file
    (`WorkerConfig.group_launcher`, `multiprocessing.connection`): the lead sends the line that the
    follower is born with, and at last gets how it ended. The connection ends with either side.

    Attributes:
      why: how it was lost, in words of who placed it; empty until it has ended.
    """

    pid = 0

    def __init__(self, launcher: str) -> None:
        """Connect to the launcher.

        Raises:
          OSError: nobody listens there.
        """
        with control.SocketPath(launcher) as path:
            self._connection = Client(path.text, "AF_UNIX")
        self._code: int | None = None
        self.why = ""

    def tell(self, line: str) -> None:
        self._connection.send_bytes(line.encode())

    def wait(self, timeout: float | None = None) -> int | None:
        if self._code is None and self._connection.poll(timeout):
            try:
                code, _, self.why = self._connection.recv_bytes().decode().partition(" ")
                self._code = int(code)
            except (EOFError, OSError):
                self._code, self.why = 1, "who started it has ended"
        return self._code


FollowerHandle = OwnFollower | PlacedFollower  # one follower of a lead


GRACE_SECONDS = 1.0  # to publish what was computed, once a follower is lost
FOLLOWER_STOP_SECONDS = 5.0  # for followers that were told to stop
SILENCE_SECONDS = 10.0  # of a follower, after which it is stopped or worse
PLACED_SILENCE_SECONDS = 3.5  # of one on another node, which may be gone; once it has begun
FOLLOWER_START_SECONDS = 60.0  # more, until its first heartbeat
ANSWER_SECONDS = 0.01  # between two looks for followers' answers


class Lead:
    """The lead's side of its group: a context, and an error inside it ends the process at once."""

    def __init__(
        self, start: control.Start, ring: RingWriter, client: control.ControlClient
    ) -> None:
        """Start the followers and connect to them. A group of one has none.

        Args:
          start: what the lead was born with; its `config` says how many processes there are.
          ring: where the lead's messages go.
          client: whose thread hears the followers' heartbeats, and tells the engine of them.
        """
        self._ring = ring
        self._client = client
        self._links: list[control.Link] = []
        self._heard: list[
            tuple[int, control.Liveness]
        ] = []  # beats of each follower, and its liveness
        self._size = start.config.num_processes
        self._followers: list[FollowerHandle] = []
        self._sending = threading.Lock()  # held while a message is written, and to end for good
        self._closing = False
        self._lost = ("", 1)  # how the first lost follower ended, and the lead's exit status
        self._is_lost = threading.Event()
        if self._size == 1:
            return
        try:
            self._start(start)
        except BaseException as error:
            self._end("".join(traceback.format_exception(error)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self._followers:
            return
        if error is None:
            leave_group()
            for follower in self._followers:
                follower.wait(FOLLOWER_STOP_SECONDS)
        elif isinstance(error, SystemExit):
            self._end("")
        elif self._is_lost.wait(GRACE_SECONDS):  # an error of a collective is its consequence
            self._end(*self._lost)
        else:
            self._end("".join(traceback.format_exception(error)))

    def send(self, data: np.ndarray, /) -> None:
        """Send a message; the end of a follower does not cut it off."""
        with self._sending:
            self._ring.send(data)

    def tell(self, command: control.Command) -> None:
        """Send a command to all followers, which carry it out as the lead does."""
        self._closing |= isinstance(command, control.Shutdown)
        if self._links:
            payload = control.to_bytes(command)
            for link in self._links:
                link.tell(payload)
            self._server.pump()  # what they have taken need not be kept

    def refusal(self, number: int) -> str:
        """Wait until all followers have answered update `number`; why one refuses it, or ""."""
        while any(link.heartbeat.answered < number for link in self._links):
            self._server.pump()
            time.sleep(ANSWER_SECONDS)
        for index, link in enumerate(self._links, 1):
            if link.heartbeat.refusal:
                return f"process {index} of {self._size}: {link.heartbeat.refusal}"
        return ""

    def _start(self, start: control.Start) -> None:
        config = start.config
        self._port = _reserved_port(config.group_host)
        coordinator = f"{config.group_host}:{self._port.getsockname()[1]}"
        self._server = control.ControlServer(config.group_address, folder=Path(start.folder))
        for index in range(1, self._size):
            link = self._server.link()
            follower: FollowerHandle = (
                OwnFollower()
                if index < config.devices_here
                else PlacedFollower(config.group_launcher)
            )
            self._followers.append(follower)
            self._links.append(link)
            watch = threading.Thread(target=self._watch, args=(index, follower), daemon=True)
            watch.start()
            born = replace(
                start,
                ring="",
                parent=os.getpid(),
                control=link.connection,
                member=control.Member(index=index, coordinator=coordinator),
            )
            follower.tell(control.to_line(born))
        self._heard = [
            (0, control.Liveness(follower.pid, grace=FOLLOWER_START_SECONDS))
            for follower in self._followers
        ]
        self._client.stats.members = self._phases
        self._client.beside = self._listen
        join(0, self._size, coordinator, local=0)

    def _phases(self) -> tuple[str, ...]:
        return tuple(str(link.heartbeat) for link in self._links)

    def _listen(self) -> None:
        """Hear the followers; one that is silent ends the group. Called by the control thread."""
        self._server.pump()
        now = time.monotonic()
        for place, link in enumerate(self._links):
            beats, liveness = self._heard[place]
            follower = self._followers[place]
            limit = SILENCE_SECONDS if follower.pid or not beats else PLACED_SILENCE_SECONDS
            lives = liveness.look(now, beat=link.heartbeat.beats != beats, limit=limit)
            self._heard[place] = link.heartbeat.beats, liveness
            if not lives and not self._closing:
                self._end(
                    f"process {place + 1} of {self._size} {_where(follower)} sent no heartbeat "
                    f"for {limit:g} seconds"
                )

    def _watch(self, index: int, follower: FollowerHandle) -> None:
        code = follower.wait()
        assert code is not None
        if self._closing and code == 0:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        if not self._is_lost.is_set():
            text = f"process {index} of {self._size} {_where(follower)} {how}"
            self._lost = text, control.GROUP_KILLED - code if code < 0 else 1
            self._is_lost.set()
        time.sleep(GRACE_SECONDS)  # the main thread may hang from now on
        self._end(*self._lost)

    def _end(self, text: str, status: int = 1) -> NoReturn:
        """End this process, and so the followers; no exit handler waits for them."""
        with self._sending:
            try:
                if text:
                    print(text, file=sys.stderr, flush=True)
            finally:  # whoever reads it may be gone
                os._exit(status)


def _where(follower: FollowerHandle) -> str:
    if isinstance(follower, PlacedFollower):
        return f"on another node ({follower.why})" if follower.why else "on another node"
    return f"(pid {follower.pid})"


def join(index: int, size: int, coordinator: str, *, local: int) -> None:
    """Make this process number `index` of `size`, with one device; before JAX has devices.

    Args:
      local: which of the accelerators that this process sees is its own.
    """
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        coordinator,
        size,
        index,
        local_device_ids=local,
        coordinator_bind_address=coordinator,  # by default it would listen to every network
    )


def leave_group() -> None:
    """End this process's part in its group; waits until all the others do so too."""
    jax.distributed.shutdown()


def _reserved_port(host: str) -> socket.socket:
    """A socket that keeps its port from other groups, and lets this process's coordinator in."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    port.bind((host, 0))
    return port
