"""Finds and removes what dead processes left in /dev/shm.

A ring that has both its sides leaves nothing. A creator that is killed before the other side
attaches leaves its names: memory, semaphores, perhaps a FIFO. Each name says who created it (pid,
start time, and the namespaces in which these have their meaning), so the doctor finds leftovers
without opening them. It removes the names of dead creators only. It lists and keeps those of live
creators, of other users, and of creators about which it cannot know: those of other pid or time
namespaces, where this process sees other pids or start times. Run it where they ran.

    python -m ipc.doctor [--remove]
"""

import contextlib
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ipc.errors import RingError
from ipc.os_errors import explained
from ipc.peers import ProcessIdentity, current_process, is_alive
from ipc.protocol import SEMAPHORES
from ipc.segment_names import PREFIX, SHM_DIRECTORY, creator_of, from_text, to_text

SegmentState = Literal["dead", "alive", "other namespace", "other user"]
UNKNOWN: SegmentState = "other namespace"


@dataclass(frozen=True, slots=True)
class RingFile:
    """One name of a ring in /dev/shm.

    Attributes:
      path: the file.
      kind: "memory", "semaphore" or "doorbell".
      size: bytes that it occupies.
      creator: the process that the name gives as its creator.
      state: of the creator; "dead" means that the file is a leftover and may be removed.
    """

    path: Path
    kind: str
    size: int
    creator: ProcessIdentity
    state: SegmentState


def find_ring_files(directory: Path = SHM_DIRECTORY) -> list[RingFile]:
    """Lists every name of a ring in `directory`, sorted by path. Opens and changes nothing.

    Raises:
      RingError: the operating system refuses to list them, or to say which processes live.
    """
    files = []
    me = current_process()
    with explained(f"list {directory}"):
        entries = sorted(directory.iterdir())
    for entry in entries:
        parsed = _parse(entry.name)
        if parsed is None:
            continue
        kind, creator = parsed
        try:
            status = entry.lstat()
        except FileNotFoundError:
            continue  # its owner removed it meanwhile
        right_type = stat.S_ISFIFO if kind == "doorbell" else stat.S_ISREG
        if right_type(status.st_mode):
            state = _state(creator, status.st_uid, me)
            files.append(RingFile(entry, kind, status.st_blocks * 512, creator, state))
    return files


def remove_leftovers(files: list[RingFile]) -> list[RingFile]:
    """Removes the files of dead creators, and returns these files."""
    removed = []
    for file in files:
        if file.state == "dead":
            # No other process can have taken the name over: its pid and start time are unique.
            with contextlib.suppress(FileNotFoundError):
                file.path.unlink()
            removed.append(file)
    return removed


def this_process() -> str:
    """Returns this process in words that `state_of` and `remove_rings_of` understand anywhere.

    Raises:
      RingError: /proc does not say which process this is.
    """
    return to_text(current_process())


def state_of(process: str, owner: int) -> SegmentState | None:
    """Says whether a process lives, from what its `this_process` returned.

    Args:
      process: the words; None is returned where they are something else.
      owner: user id of the file that holds them.

    Raises:
      RingError: the operating system does not say which processes live.
    """
    creator = from_text(process)
    return None if creator is None else _state(creator, owner, current_process())


def remove_rings_of(process: str) -> None:
    """Removes every name that this process left in /dev/shm, if it is dead.

    Raises:
      RingError: the operating system refuses to list them, or to say which processes live.
    """
    creator = from_text(process)
    remove_leftovers([file for file in find_ring_files() if file.creator == creator])


def report(files: list[RingFile], removed: list[RingFile]) -> str:
    """Returns what `main` prints about the files found and those removed."""
    if not files:
        return f"no rings in {SHM_DIRECTORY}: nothing was left behind"
    lines = []
    for file in files:
        what = "removed" if file in removed else file.state
        lines.append(f"{what:16} {file.size:>12,} B  pid {file.creator.pid:<8} {file.path}")
    leftovers = [file for file in files if file.state == "dead" and file not in removed]
    lines.append(
        f"{len(files)} {'name' if len(files) == 1 else 'names'}: {len(removed)} removed, "
        f"{len(leftovers)} left by dead processes"
    )
    if leftovers:
        lines.append("run again with --remove to remove them")
    unknown = {file.creator for file in files if file.state == UNKNOWN}
    for creator in sorted(unknown, key=lambda creator: (creator.pid_namespace, creator.pid)):
        lines.append(
            f"kept: pid {creator.pid} of pid namespace {creator.pid_namespace} and time namespace "
            f"{creator.time_namespace} cannot be seen from here. Run this in its namespaces"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the report.

    Returns the exit status: 1 while leftovers remain, 2 where it cannot know, else 0.
    """
    import argparse  # milliseconds, which processes that only ask for `this_process` need not spend

    parser = argparse.ArgumentParser(
        prog="python -m ipc.doctor", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--remove", action="store_true", help="remove what dead processes left")
    options = parser.parse_args(arguments)
    try:
        files = find_ring_files()
    except RingError as error:
        print(f"nothing was removed: {error}")
        return 2
    removed = remove_leftovers(files) if options.remove else []
    print(report(files, removed))
    return int(any(file.state == "dead" and file not in removed for file in files))


def _parse(file_name: str) -> tuple[str, ProcessIdentity] | None:
    kind, ring = "memory", file_name
    if file_name.startswith(f"sem.{PREFIX}."):
        ring, _, suffix = file_name.removeprefix("sem.").rpartition(".")
        kind = "semaphore"
        if suffix not in SEMAPHORES:
            return None
    elif file_name.endswith(".bell"):
        kind, ring = "doorbell", file_name.removesuffix(".bell")
    creator = creator_of(f"/{ring}")
    return None if creator is None else (kind, creator)


def _state(creator: ProcessIdentity, owner: int, me: ProcessIdentity) -> SegmentState:
    if owner != os.geteuid():
        return "other user"
    if not creator.shares_namespaces(me):
        return UNKNOWN
    return "alive" if is_alive(creator) else "dead"


if __name__ == "__main__":
    sys.exit(main())
