"""Remove leftovers of killed replicas: rings in shared memory, and files of weights.

A ring whose two sides have met has no name any more, and goes with them. One whose
engine was killed before that keeps its name. Only what names a dead process of this very host as
its maker is removed (`ipc.doctor`): no ring that anybody uses, and nothing of other users.
"""

import logging
import os
import time
from pathlib import Path

from ipc import RingError, doctor
from jax_specdec.engine import leftovers

logger = logging.getLogger("jax_specdec.ray")
RINGS = Path("/dev/shm")
KILLED_SECONDS = 5.0  # for a process that was killed
KILLED_LOOK_SECONDS = 0.02


def remove_host_leftovers(
    process: str = "", *, rings: Path = RINGS, folders: Path | None = None
) -> None:
    """Remove what dead processes left on this host.

    Directories with what workers printed stay, for who looks for a reason.

    Args:
      process: one that is about to end, as `ipc.doctor.this_process` names it; waited for.
      rings: where rings are.
      folders: where engines have their directories; None: the system's temporary directory.
    """
    deadline = time.monotonic() + KILLED_SECONDS
    try:
        while (
            process
            and doctor.state_of(process, os.geteuid()) == "alive"
            and time.monotonic() < deadline
        ):
            time.sleep(KILLED_LOOK_SECONDS)
        removed = doctor.remove_leftovers(doctor.find_ring_files(rings))
        remaining = [
            leftover for leftover in leftovers.find_leftovers(folders) if not leftover.outputs
        ]
        folders_removed = leftovers.remove(remaining)
    except (RingError, OSError) as error:  # a replica works as well beside leftovers
        logger.warning("what dead processes left was not removed: %s", error)
        return
    for path in [
        *(leftover.path for leftover in removed),
        *(leftover.path for leftover in folders_removed),
    ]:
        logger.info("removed %s: its process is dead", path)
