"""The control plane: commands from an engine to its workers, and their heartbeats back.

Commands travel over ZeroMQ, numbered and acknowledged; nothing here waits for another process.
Records never come this way: they go through the ring.
"""

import jax_specdec.beside.ipc  # noqa: F401
from jax_specdec.control.channel import ControlClient, ControlServer, Link
from jax_specdec.control.commands import (
    DRAFT_WIDTHS,
    DRAFTERS,
    GROUP_KILLED,
    IMPLEMENTATIONS,
    Admit,
    Advance,
    Command,
    Commit,
    Connection,
    ControlError,
    Discard,
    Evict,
    Member,
    Prepare,
    Release,
    Shutdown,
    Start,
    WorkerConfig,
    from_bytes,
    from_line,
    to_bytes,
    to_line,
)
from jax_specdec.control.heartbeat import (
    BEAT_SECONDS,
    Heartbeat,
    Liveness,
    Phase,
    ProcessStats,
    QuietTimer,
)
from jax_specdec.control.socket_path import SocketPath

__all__ = [
    # Commands.
    "Command",
    "Admit",
    "Evict",
    "Release",
    "Shutdown",
    "Advance",
    "Prepare",
    "Commit",
    "Discard",
    "to_bytes",
    "from_bytes",
    "ControlError",
    # What a worker is born with.
    "Start",
    "WorkerConfig",
    "Connection",
    "Member",
    "DRAFTERS",
    "DRAFT_WIDTHS",
    "IMPLEMENTATIONS",
    "GROUP_KILLED",
    "to_line",
    "from_line",
    # Both ends of the channel.
    "ControlServer",
    "Link",
    "ControlClient",
    "SocketPath",
    # Heartbeats.
    "Heartbeat",
    "Phase",
    "ProcessStats",
    "QuietTimer",
    "Liveness",
    "BEAT_SECONDS",
]
