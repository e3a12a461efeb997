"""Errors of a cluster, and which of Ray's say that something is lost."""

import importlib
from typing import Any

from ipc import RingError
from jax_specdec.engine.errors import EngineClosed, WeightsError, WorkerFailed


def ray(module: str = "ray") -> Any:
    """Import Ray, or a module of it; ModuleNotFoundError names the way out."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("ray", "fastapi", "pandas"):
            raise
        raise ModuleNotFoundError(
            f"engines on a cluster need {error.name}: "
            "pip install 'ray[default,serve,data]>=2.50' 'pyarrow>=16'",
            name=error.name,
        ) from error


# What may keep an engine from beginning, or end it, on one node. Anything else that it raises is a
# mistake in a program, which another start would repeat.
CANNOT_BEGIN = (WorkerFailed, EngineClosed, WeightsError, RingError, OSError)
# Ray's own errors where an actor, a node, an object or an answer is gone. `RayTaskError` is none of
# them: it carries what a replica's code raised.
NAMES_OF_LOSSES = (
    "RayActorError",
    "NodeDiedError",
    "WorkerCrashedError",
    "LocalRayletDiedError",
    "OutOfMemoryError",
    "ObjectLostError",
    "TaskUnschedulableError",
    "ActorUnschedulableError",
    "TaskPlacementGroupRemoved",
    "ActorPlacementGroupRemoved",
    "RuntimeEnvSetupError",
    "RaySystemError",
    "RpcError",
    "GetTimeoutError",
)


def lost_errors() -> tuple[type[Exception], ...]:
    """Errors of Ray where an actor, its node, an object or an answer is gone."""
    errors = ray("ray.exceptions")
    return tuple(getattr(errors, name) for name in NAMES_OF_LOSSES)


class ClusterError(RuntimeError):
    """The cluster does not serve: its head is away, a store is full, or no node has room."""


class NotBegun(RuntimeError):
    """A replica that Ray has just started again was told something: nobody has begun it yet."""


def full_store(what: str, error: BaseException) -> ClusterError:
    """The error of an object store that takes nothing more."""
    return ClusterError(
        f"Ray's object store is full, and so is the disk behind it: {what} cannot be stored "
        f"({type(error).__name__}). Batches are views of the store: drop each once it is read, or "
        "copy it, as `columns(batches)` does. Else start nodes with a larger "
        "--object-store-memory, or free their disks"
    )
