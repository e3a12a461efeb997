"""Refusals of the operating system as RingErrors that say which limit was met, and the way out."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import posix_ipc

from ipc.errors import RingError

_DESCRIPTORS = resource.RLIMIT_NOFILE, "RLIMIT_NOFILE"
_ADDRESSES = resource.RLIMIT_AS, "RLIMIT_AS"


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns OSError, MemoryError and posix_ipc.Error inside the block into RingError.

    Args:
      doing: what the block does, as it continues the words "cannot ...".

    Raises:
      RingError: says which limit was met; the operating system's error is its __cause__.
    """
    try:
        yield
    except RingError:
        raise
    except (OSError, MemoryError, posix_ipc.Error) as error:
        raise RingError(f"cannot {doing}: {reason(error)}") from error


def error_number(error: BaseException) -> int | None:
    """Returns the errno, also of errors that posix_ipc raises without one; None if unknown."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, posix_ipc.PermissionsError):
        return errno.EACCES
    number = getattr(error, "errno", None)
    return number if isinstance(number, int) else None


def reason(error: BaseException) -> str:
    """Returns what the operating system refused, by which limit, and what to do about it."""
    number = error_number(error)
    if number == errno.EMFILE:
        return (
            f"this process has {_open_descriptors()} descriptors open and may have "
            f"{_limit(*_DESCRIPTORS)}. Close what is not needed, or raise the limit (ulimit -n)"
        )
    if number == errno.ENFILE:
        return (
            "the machine has no free file descriptor (/proc/sys/fs/file-max). End what holds many, "
            "or raise the limit"
        )
    if number == errno.ENOMEM:
        return (
            f"the kernel gives this process no more memory ({error or 'ENOMEM'}); its limit of "
            f"address space is {_limit(*_ADDRESSES)}. Raise that limit (ulimit -v), the limit of "
            "the container's memory, or vm.max_map_count, or need less"
        )
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{error}: nothing is left of a limit of this machine or user. Free some of it"
    return str(error)


def _open_descriptors() -> int | str:
    # One descriptor is needed to list them, and there may be none: then the limit is what is open.
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return "all"


def _limit(which: int, name: str) -> str:
    soft, _ = resource.getrlimit(which)
    return f"without a limit ({name})" if soft == resource.RLIM_INFINITY else f"{soft} ({name})"
