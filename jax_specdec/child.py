"""A worker's process before it imports anything that takes its time.

    python -P -m jax_specdec.child MODULE [PARENT]

Its parent (an engine, or the lead of a group) writes one line to its standard input, the `Start`,
and keeps the pipe open. A parent that is killed before the line is whole may have made a ring: the
child removes it, by PARENT (`ipc.doctor.this_process`). First the process leaves SIGTERM, SIGINT
and SIGHUP to its parent, and attaches to its ring, of which nothing then stays behind, whoever
dies. Then it ties itself to its parent: the kernel kills it, even where it is stopped, and a thread
ends it where the pipe ends. Then it begins to send heartbeats. Only after all this does it import
MODULE and call its `main(child)`.

A parent may start it before there is anything to say. While it waits for the line it imports MODULE
in a thread, so that it ends with its parent as fast as otherwise.

https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ipc import RingWriter
    from jax_specdec.control import ControlClient, Start

PR_SET_PDEATHSIG = 1
STDIN = 0


class Child:
    """A process that its parent can talk to.

    Attributes:
      start: what it was born with.
      client: where its commands come from.
      commands: its commands.
      stats: what its heartbeats say.
      ring: where its messages go; None for a follower.
    """

    def __init__(self, start: "Start", client: "ControlClient", ring: "RingWriter | None") -> None:
        self.start = start
        self.client = client
        self.commands, self.stats = client.commands, client.stats
        self.ring = ring


def begin(parent: str = "", module: str = "") -> Child:
    """Tie this process to its parent, and begin to send heartbeats.

    Args:
      parent: whose rings to remove if it has ended already; empty for nobody's.
      module: what to import as long as the parent says nothing; empty for nothing.
    """
    leave_signals_to_parent()
    line = _first_line(module)
    if not line:  # it ended before it could say anything
        _remove_rings_of(parent)
        os._exit(1)
    born = json.loads(line)
    ring = None
    if born["ring"]:
        from ipc import RingError, RingWriter

        try:
            ring = RingWriter.attach(born["ring"])
        except RingError:
            if os.getppid() == born["parent"]:
                raise
            os._exit(1)  # it ended, and so has the ring
    die_with_parent(born["parent"])
    threading.Thread(target=_end_with_pipe, name="lifeline", daemon=True).start()
    from jax_specdec.control import ControlClient, ProcessStats, from_line

    start = from_line(line)
    assert start.control is not None
    client = ControlClient(start.control, ProcessStats())
    client.start()
    return Child(start, client, ring)


def leave_signals_to_parent() -> None:
    """Ignore the signals by which a supervisor ends a service: the parent decides what ends when.

    systemd sends them to every process of a service, and a terminal to every one of a group. A
    parent that drains needs its children for that.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Args:
      parent: id of the process that started it; where that has ended already, this one ends now.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl cannot tie this process to its parent")
    if os.getppid() != parent:  # it ended before it was watched
        os._exit(1)


def _remove_rings_of(parent: str) -> None:
    from ipc import RingError, doctor

    with contextlib.suppress(RingError, OSError):  # nobody is there to hear of it
        doctor.remove_rings_of(parent)


def _first_line(module: str) -> bytes:
    importing = None
    if module and not select.select([STDIN], [], [], 0)[0]:
        importing = threading.Thread(target=_import_ahead, args=[module], daemon=True)
        importing.start()
    line = b""
    while not line.endswith(b"\n") and (more := os.read(STDIN, 1 << 16)):
        line += more
    if not line.endswith(b"\n"):
        return b""
    if importing is not None:
        importing.join()  # two threads that import the same at once may meet half a module
    return line


def _import_ahead(module: str) -> None:
    gc.disable()  # all that an import makes stays
    with contextlib.suppress(Exception):  # `main` meets it again, once there is who hears of it
        importlib.import_module(module)
    gc.enable()


def _end_with_pipe() -> NoReturn:
    """End at the end of the pipe. Nothing is printed: whoever would read it may be gone."""
    while os.read(STDIN, 1 << 16):
        pass
    os._exit(1)


def main(arguments: list[str]) -> int:
    """Entry point; the arguments are the module to run, and perhaps the parent."""
    name, parent = (*arguments, "")[:2]
    child = begin(parent, name)
    status: int = importlib.import_module(name).main(child)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
