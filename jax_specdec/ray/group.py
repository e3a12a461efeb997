"""A model over several nodes: a replica's lead asks here for followers, and actors start them.

The lead is a child of the replica's engine, and no part of Ray. It connects to a socket
file in a directory that only this user may enter, once for each follower on another node; see
`jax_specdec.device.worker.process_group`. What travels there are a line and an exit status.
"""

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from jax_specdec.control import SocketPath
from jax_specdec.engine import leftovers
from jax_specdec.engine.child_process import ChildProcess
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.last_words import reason_line
from jax_specdec.ray.errors import lost_errors, ray

_LOST = 1  # the exit status of a follower of which nothing more is heard


class Followers:
    """The other nodes of a replica's model, for its lead."""

    def __init__(self, actors: Sequence[Any]) -> None:
        """Know the actors, one a node, in order."""
        self._actors = list(actors)
        self._folder: Path | None = None
        self._listener: Listener | None = None
        self._path: SocketPath | None = None

    def placed(self, config: EngineConfig) -> EngineConfig:
        """The configuration of a lead that asks here; its ports are free ones of this node."""
        self.close()
        host = ray("ray.util").get_node_ip_address()
        self._folder = Path(tempfile.mkdtemp(prefix=leftovers.DIRECTORY_PREFIX))
        leftovers.mark_owner(self._folder)
        address = str(self._folder / "followers")
        self._path = SocketPath(address)
        self._listener = Listener(self._path.text, "AF_UNIX", backlog=64)
        threading.Thread(
            target=self._accept, args=(self._listener,), name="followers", daemon=True
        ).start()
        return replace(
            config,
            group_host=host,
            group_address=f"tcp://{host}:*",
            group_nodes=1 + len(self._actors),
            group_launcher=address,
        )

    def close(self) -> None:
        """Start no further follower."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._path is not None:
            self._path.close()
            self._path = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:  # it was closed
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="follower", daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        """Have one follower started, and tell the lead how it ended."""
        with connection, contextlib.suppress(EOFError, OSError):
            line = connection.recv_bytes().decode()
            born = json.loads(line)
            index, config = born["member"]["index"], born["config"]
            devices_here = config["tensor_parallel"] // config["group_nodes"]
            actor = self._actors[index // devices_here - 1]
            ended = actor.run.remote(index, line)
            # Two waits: for the follower's end, and for the lead's.
            threading.Thread(
                target=self._stop_with_lead, args=(connection, actor, index, ended), daemon=True
            ).start()
            try:
                code, words = ray().get(ended)
            except lost_errors() as error:
                code, words = _LOST, str(error).strip().partition("\n")[0]
            connection.send_bytes(f"{code} {words}".encode())

    def _stop_with_lead(self, connection: Connection, actor: Any, index: int, ended: Any) -> None:
        with contextlib.suppress(OSError, EOFError):
            connection.recv_bytes()  # the lead says nothing more: this is its end
        done, _ = ray().wait([ended], timeout=0)
        if not done:
            actor.stop.remote(index)


class Follower:
    """An actor on another node of a model: it starts processes there, which end with it."""

    def __init__(self, program: Sequence[str] = ()) -> None:
        """Start nothing yet.

        Args:
          program: of a follower; empty for the model's own.
        """
        from jax_specdec.engine.worker_client import WORKER

        command = (*WORKER[:-1], "jax_specdec.device.worker.follower_process")
        self._program = tuple(program) or command
        self._running: dict[int, ChildProcess] = {}

    def node(self) -> str:
        """The id of its node."""
        node_id: str = ray().get_runtime_context().get_node_id()
        return node_id

    def run(self, index: int, line: str) -> tuple[int, str]:
        """Run one process to its end: its exit status, and where it was, or its last words."""
        import signal

        self.stop(index)
        born = json.loads(line) | {"parent": os.getpid(), "folder": ""}
        folder = Path(tempfile.mkdtemp(prefix=leftovers.DIRECTORY_PREFIX))
        leftovers.mark_owner(folder)
        try:
            output = folder / f"follower-{index}.log"
            process = ChildProcess(self._program, output=output, env=os.environ)
            self._running[index] = process
            try:
                process.write(json.dumps(born) + "\n")
                while not process.wait(3600.0):
                    pass
                code = process.exit_status or 0
                host = ray("ray.util").get_node_ip_address()
                words = f"pid {process.pid} at {host}"
                if code > 0 and (line := reason_line(process.last_words(lines=1 << 18))):
                    words += f"; it printed last: {line}"
                return code, words
            finally:
                process.send_signal(signal.SIGKILL)
                process.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self, index: int) -> None:
        """End a process, if it still runs."""
        import signal

        process = self._running.pop(index, None)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(5.0)
