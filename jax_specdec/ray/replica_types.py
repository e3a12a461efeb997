"""Commands to a replica and its words of itself, as values."""

from dataclasses import dataclass
from typing import Any

from jax_specdec.engine.updates import WorkerStatus
from jax_specdec.records.processor_state import Progress
from jax_specdec.requests import Request


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request for a replica, and what was delivered of it before.

    Attributes:
      deadline: seconds from now, after which it ends; None: never.
    """

    request: Request
    progress: Progress | None = None
    deadline: float | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights for a replica: their number, and a path or arrays in the object store."""

    version: int
    path: str = ""
    arrays: Any = None  # a list of one reference, which Ray then leaves alone


@dataclass(frozen=True)
class ReplicaAddress:
    """Where a replica is.

    Attributes:
      node: the id of its node, as Ray has it.
      process: the actor's, as `ipc.doctor.this_process` names it.
    """

    node: str
    process: str


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One replica's numbers at one moment.

    Attributes:
      replica: its number.
      node: the id of its node, as Ray has it; empty while it has none.
      host: the node's address.
      pid: of the actor, which is the engine's process; 0 while there is none.
      state: "starting", "ready", "lost", or "gone" for good.
      losses: how often it was lost.
      open_requests: those that it has.
      steps: of its workers, since it began.
      workers: as `Engine.status`; empty while there is no engine.
      problem: why it is not ready.
      events: how it lost workers, the latest last; a few of them.
    """

    replica: int
    node: str = ""
    host: str = ""
    pid: int = 0
    state: str = "ready"
    losses: int = 0
    open_requests: int = 0
    steps: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    problem: str = ""
    events: tuple[str, ...] = ()
