"""Seconds on the device's own clock: neither Python nor the launching of kernels is in them.

Each piece of work is enqueued behind a plug, a kernel that runs longer than launching takes: the
work's kernels are all queued when it ends, and it has evicted the L2 cache. Afterwards the host
waits, and pauses, so that the profiler's timeline falls into one cluster of kernels for each piece:
the plug, then the work. Python's own launches are slower than most of what is measured here.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

PAUSE = 2e-3  # seconds of idle device between pieces; no gap inside a piece comes near


class ClockError(RuntimeError):
    """The timeline does not hold what was launched."""


@dataclass(frozen=True)
class Work:
    """One piece of work; `launch` enqueues it and returns what `wait` waits for."""

    name: str
    plug: Callable[[], Any]
    launch: Callable[[], Any]
    wait: Callable[[Any], Any]


@dataclass(frozen=True)
class Event:
    """A kernel or a copy on the device, in seconds since any moment."""

    start: float
    end: float


@dataclass(frozen=True)
class Span:
    """What one piece of work took, in seconds.

    total: from the end of the plug to the end of the last kernel, gaps between kernels included.
    busy: the part of it in which a kernel ran.
    """

    total: float
    busy: float


def device_spans(pieces: Sequence[Work]) -> list[Span]:
    """Run the pieces in order on a GPU and read its timeline.

    Raises:
      ClockError: the profiler saw another number of pieces than were launched.
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=_quiet()):
            time.sleep(PAUSE)
            for work in pieces:
                work.plug()
                work.wait(work.launch())
                time.sleep(PAUSE)
        events = read_events(Path(directory), "/device:GPU", "Stream")
    return to_spans(events, len(pieces))


def host_spans(pieces: Sequence[Work]) -> list[Span]:
    """The same by the host's clock, where there is no device: for rehearsals, not for results."""
    events = []
    begin = time.perf_counter()
    for index, work in enumerate(pieces):
        pause = index * 2 * PAUSE  # made up: nothing has to separate stamps that are taken by hand
        work.wait(work.plug())
        plugged = time.perf_counter()
        work.wait(work.launch())
        done = time.perf_counter()
        events += [Event(begin + pause, plugged + pause), Event(plugged + pause, done + pause)]
        begin = done
    return to_spans(events, len(pieces))


def to_spans(events: Iterable[Event], num_pieces: int) -> list[Span]:
    """Cut a timeline at its pauses; each cluster is a plug and then one piece's kernels."""
    clusters: list[list[Event]] = []
    end = float("-inf")
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        if event.start - end > PAUSE / 2:
            clusters.append([])
        clusters[-1].append(event)
        end = max(end, event.end)
    if len(clusters) != num_pieces or any(len(cluster) < 2 for cluster in clusters):
        raise ClockError(
            f"{num_pieces} pieces of work were launched, but the timeline shows "
            f"{len(clusters)} with {[len(cluster) for cluster in clusters][:10]} kernels each; "
            "is another program using the device, or another profiler attached?"
        )
    return [_span(cluster) for cluster in clusters]


def _span(cluster: Sequence[Event]) -> Span:
    begin = last = cluster[0].end
    busy = 0.0
    for event in cluster[1:]:
        busy += max(0.0, event.end - max(event.start, last))
        last = max(last, event.end)
    return Span(last - begin, busy)


def read_events(directory: Path, plane: str, line: str) -> list[Event]:
    """What a profile holds on lines of planes whose names start so.

    Raises:
      ClockError: there is no such line, or it is empty; says what there is.
    """
    files = sorted(directory.rglob("*.xplane.pb"))
    planes = [p for file in files for p in ProfileData.from_file(str(file)).planes]
    lines = [(p.name, found) for p in planes for found in p.lines]
    events = [
        Event(event.start_ns / 1e9, event.end_ns / 1e9)
        for name, found in lines
        if name.startswith(plane) and found.name.startswith(line)
        for event in found.events
    ]
    if not events:
        names = sorted({f"{name}: {found.name}" for name, found in lines})
        raise ClockError(
            f"the profile has no events on a line {line!r} of a plane {plane!r}, only on {names}; "
            "CUPTI (nvidia-cuda-cupti) must be installed and no other profiler attached"
        )
    return events


def _quiet() -> ProfileOptions:
    """The device's timeline alone."""
    options: Any = ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    chosen: ProfileOptions = options
    return chosen
