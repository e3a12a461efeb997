"""A core for the engine's process alone, as an engine beside a GPU has it.

jax computes on a CPU with a thread for each core. While one step is taken apart, those threads get
the other cores: then the engine's time is its work, and not its wait for a core that the device
holds. A run as a whole keeps every thread on every core.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def engine_core(pid: int) -> Iterator[None]:
    """Confine process `pid` to the last core that this one may use, and this one to the others.

    With a single core nothing happens.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        yield
        return
    last = max(cores)
    try:
        confine(pid, {last})
        confine(os.getpid(), cores - {last})
        yield
    finally:
        confine(os.getpid(), cores)
        confine(pid, cores)


def confine(pid: int, cores: set[int]) -> None:
    """Confine every thread of a process to `cores`; a thread may end meanwhile."""
    with suppress(FileNotFoundError):
        for thread in Path("/proc", str(pid), "task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
