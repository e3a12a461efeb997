"""The device's own operations, from jax.profiler, on CLOCK_MONOTONIC."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from bench.loop.spans import DeviceEvent

ANCHOR = "jax-specdec clock anchor"
# On a CPU, XLA's operations run on threads with these names; a GPU's have a plane of their own.
CPU_THREADS = ("tf_XLA",)
NOT_WORK = ("ThreadpoolListener", "SlinkyThreadPool", "ThunkExecutor", "end: ")
SHORTEST_NS = 1000


@contextmanager
def recorded() -> Iterator[list[DeviceEvent]]:
    """Record the device's operations; the list is filled at the end.

    Raises:
      RuntimeError: the profiler did not record the anchor that relates its clock to ours.
    """
    found: list[DeviceEvent] = []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            anchor = time.monotonic_ns()
            with jax.profiler.TraceAnnotation(ANCHOR):
                pass
            yield found
        for path in Path(directory).rglob("*.xplane.pb"):
            found += events_of(jax.profiler.ProfileData.from_file(str(path)), anchor)


def events_of(profile: Any, anchor: int) -> list[DeviceEvent]:
    """The operations of a profile whose anchor began at `anchor` ns."""
    places = [
        int(event.start_ns)
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if event.name == ANCHOR
    ]
    if not places:
        raise RuntimeError("jax.profiler did not record the anchor: the clocks cannot be related")
    shift = anchor - places[0]
    found = []
    for plane in profile.planes:
        is_device = plane.name.startswith("/device:")
        for line in plane.lines:
            if not is_device and not line.name.startswith(CPU_THREADS):
                continue
            for event in line.events:
                begin, length = int(event.start_ns), int(event.duration_ns)
                if length >= SHORTEST_NS and not event.name.startswith(NOT_WORK):
                    name = f"{plane.name} {line.name}" if is_device else line.name
                    found.append(
                        DeviceEvent(name, event.name, begin + shift, begin + shift + length)
                    )
    return found
