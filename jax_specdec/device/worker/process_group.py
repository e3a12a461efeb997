"""Several processes that compute one model: a lead, which talks to the engine, and its followers.

JAX's own runtime connects them (`jax.distributed`), and each has one device of the model's mesh.
The lead sends its followers every command that it carries out, `Advance` among them, so that all
run the same programs in the same order. The lead alone publishes.

They end together. The kernel kills a follower whose lead has ended, and a thread of the lead waits
for each follower: neither depends on a main thread, which may hang in a collective.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn, Self

import jax
import numpy as np

from ipc import RingWriter
from jax_specdec.control import GROUP_KILLED, Command, Shutdown, Start, to_line

# -P: a file in the current directory must not stand in for a module of the follower.
FOLLOWER = (sys.executable, "-P", "-m", "jax_specdec.device.worker.follower_process")
HOST = "127.0.0.1"  # one host: the engine reads shared memory
GRACE_SECONDS = 1.0  # to publish what was computed, once a follower is lost
PATIENCE_SECONDS = 5.0  # for followers that were told to stop
PR_SET_PDEATHSIG = 1  # man 2 prctl


class Lead:
    """The lead's side of its group: a context, and an error inside it ends the process at once."""

    def __init__(self, start: Start, ring: RingWriter) -> None:
        """Start the followers and connect to them. A group of one has none.

        Args:
          start: the worker's first command; its `config` says how many processes there are.
          ring: where the lead's messages go.
        """
        self._ring = ring
        self._size = start.config.num_processes
        self._followers: list[subprocess.Popen[str]] = []
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
            leave()
            for follower in self._followers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    follower.wait(PATIENCE_SECONDS)
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

    def tell(self, command: Command) -> None:
        """Send a command to all followers, which carry it out as the lead does."""
        self._closing |= isinstance(command, Shutdown)
        for follower in self._followers:
            assert follower.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is noticed by its thread
                follower.stdin.write(to_line(command))
                follower.stdin.flush()

    def _start(self, start: Start) -> None:
        self._port = _reserved_port()
        coordinator = f"{HOST}:{self._port.getsockname()[1]}"
        for index in range(1, self._size):
            command = (*FOLLOWER, str(index), coordinator, str(os.getpid()))
            follower = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            self._followers.append(follower)
            watch = threading.Thread(target=self._watch, args=(index, follower), daemon=True)
            watch.start()
        self.tell(start)
        join(0, self._size, coordinator)

    def _watch(self, index: int, follower: subprocess.Popen[str]) -> None:
        code = follower.wait()
        if self._closing and code == 0:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        if not self._is_lost.is_set():
            text = f"process {index} of {self._size} (pid {follower.pid}) {how}"
            self._lost = text, GROUP_KILLED - code if code < 0 else 1
            self._is_lost.set()
        time.sleep(GRACE_SECONDS)  # the main thread may hang from now on
        self._end(*self._lost)

    def _end(self, text: str, status: int = 1) -> NoReturn:
        """End this process, and so the followers; no exit handler waits for them."""
        with self._sending:
            if text:
                print(text, file=sys.stderr, flush=True)
            os._exit(status)


def join(index: int, size: int, coordinator: str) -> None:
    """Make this process number `index` of `size`, with one device; before JAX has devices."""
    jax.config.update("jax_num_cpu_devices", 1)  # type: ignore[no-untyped-call]
    jax.distributed.initialize(
        coordinator,
        size,
        index,
        local_device_ids=index,  # its own of several accelerators
        coordinator_bind_address=coordinator,  # by default it would listen to every network
    )


def leave() -> None:
    """End this process's part in its group; waits until all the others do so too."""
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


def end_with(pid: int) -> None:
    """Have the kernel kill this process when its parent `pid` ends, whatever this one does then."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl cannot tie this process to its parent")
    if os.getppid() != pid:  # the parent had ended before
        os._exit(1)


def _reserved_port() -> socket.socket:
    """A socket that keeps its port from other groups, and lets this process's coordinator in."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    port.bind((HOST, 0))
    return port
