"""Errors of a cluster."""


class ClusterError(RuntimeError):
    """The cluster does not serve: its head is away, a store is full, or no node has room."""


class NotBegun(RuntimeError):
    """A replica that Ray has just started anew was told something: nobody has begun it yet."""


def full_store(what: str, error: BaseException) -> ClusterError:
    """The error of an object store that takes nothing more."""
    return ClusterError(
        f"Ray's object store is full, and so is the disk behind it: {what} cannot be stored "
        f"({type(error).__name__}). Batches are views of the store: drop each once it is read, or "
        "copy it, as `columns(batches)` does. Else start nodes with a larger "
        "--object-store-memory, or free their disks"
    )
