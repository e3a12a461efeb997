"""A core for the engine's process alone, as beside a GPU: a CPU that is the device takes them all.

The threads that jax computes with are as many as there are cores. While one step is taken apart
they get the others, so that what is measured is the engine's work and not its wait for a core that
the device holds; a run as a whole keeps every thread on every core.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def engine_core(pid: int) -> Iterator[None]:
    """Process `pid` on the last core that this one may use, this one's threads on the others.

    With a single core there is nothing to divide, and nothing happens.
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
    """Every thread of a process onto `cores`; one that ends meanwhile does not matter."""
    with suppress(FileNotFoundError):
        for thread in Path("/proc", str(pid), "task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
