"""The names of a ring in /dev/shm, and how they say who made them.

A ring named N owns these names, all of mode 0600:

    N                the memory: header, one line per side, descriptors, slots
    N.freed, N.items, N.seat, N.joined
                     the semaphores of `ipc.protocol`
    N.bell           a FIFO, only with doorbell=True (see ipc.doorbell)

N is `jax-specdec-ring.PIDS-TIMES.PID.START.TOKEN` and so says who created the ring: leftovers can
be told from live rings without trusting their bytes. PIDS and TIMES are the inodes of the
namespaces in which PID and START have their meaning, TOKEN is 128 random bits.
"""

import contextlib
import os
import re
from pathlib import Path

import posix_ipc

from ipc.peers import ProcessIdentity
from ipc.protocol import SEMAPHORES

SHM_DIRECTORY = Path("/dev/shm")
PREFIX = "jax-specdec-ring"
_OWNER = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16})\.(\d{1,10})\.(\d{1,20})")
_NAME = re.compile(rf"/{PREFIX}\.({_OWNER.pattern})\.[0-9a-f]{{32}}")


def new_name(creator: ProcessIdentity) -> str:
    """Returns an unguessable ring name that says who created it."""
    return f"/{PREFIX}.{to_text(creator)}.{os.urandom(16).hex()}"


def creator_of(name: str) -> ProcessIdentity | None:
    """Reads the creator out of a ring's name; None if it is not the name of a ring."""
    match = _NAME.fullmatch(name)
    return None if match is None else from_text(match[1])


def to_text(process: ProcessIdentity) -> str:
    """Writes a process as PIDS-TIMES.PID.START, as in the names of its rings."""
    return (
        f"{process.pid_namespace:x}-{process.time_namespace:x}.{process.pid}.{process.start_time}"
    )


def from_text(text: str) -> ProcessIdentity | None:
    """Reads what `to_text` wrote; None if it is something else."""
    match = _OWNER.fullmatch(text)
    if match is None:
        return None
    return ProcessIdentity(int(match[3]), int(match[4]), int(match[1], 16), int(match[2], 16))


def bell_path(name: str) -> Path:
    """Returns the path of the ring's FIFO."""
    return SHM_DIRECTORY / f"{name[1:]}.bell"


def unlink_names(name: str) -> None:
    """Removes all the names of a ring; some or all of them may be gone already."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
    for suffix in SEMAPHORES:
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_semaphore(f"{name}.{suffix}")
    bell_path(name).unlink(missing_ok=True)


def remove_names(name: str) -> None:
    """Removes the names of a ring that cannot be made or used: the reason must not be hidden.

    Where files may not be made, removing them fails too.
    """
    with contextlib.suppress(OSError, posix_ipc.Error):
        unlink_names(name)
