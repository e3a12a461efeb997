"""Seconds on the device's own clock, without the time of Python and of launching kernels.

Each piece of work is enqueued behind a plug: a kernel that runs longer than the launches take. When
the plug ends, all kernels of the work are queued, and the L2 cache is evicted. Then the host waits
and pauses, so that the profiler's timeline has a cluster of kernels for each piece: the plug, then
the work. Launching from Python takes longer than most of the kernels that are measured here.
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
    """The timeline does not show the work that was launched."""


@dataclass(frozen=True)
class Work:
    """One piece of work; `launch` enqueues it and returns what `wait` waits for."""

    name: str
    plug: Callable[[], Any]
    launch: Callable[[], Any]
    wait: Callable[[Any], Any]


@dataclass(frozen=True)
class Event:
    """A kernel or a copy on the device, in seconds since a moment common to all."""

    start: float
    end: float


@dataclass(frozen=True)
class Span:
    """The time of one piece of work, in seconds.

    total: from the end of the plug to the end of the last kernel, gaps between kernels included.
    busy: the part of it in which a kernel ran.
    """

    total: float
    busy: float


def device_spans(pieces: Sequence[Work]) -> list[Span]:
    """Run the pieces in order on a GPU and read its timeline.

    Raises:
      ClockError: the profiler saw fewer or more pieces than were launched.
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
    """Run the pieces in order by the host's clock, in a rehearsal without a device."""
    events = []
    begin = time.perf_counter()
    for index, work in enumerate(pieces):
        pause = index * 2 * PAUSE  # invented: stamps taken by hand need no pause to separate them
        work.wait(work.plug())
        plugged = time.perf_counter()
        work.wait(work.launch())
        done = time.perf_counter()
        events += [Event(begin + pause, plugged + pause), Event(plugged + pause, done + pause)]
        begin = done
    return to_spans(events, len(pieces))


def to_spans(events: Iterable[Event], num_pieces: int) -> list[Span]:
    """Cut a timeline at its pauses; each cluster is a plug and then one piece's kernels.

    Raises:
      ClockError: the timeline does not have `num_pieces` clusters of at least two kernels.
    """
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
    """The events of a profile on lines whose names, and planes' names, start like these.

    Raises:
      ClockError: there is no such line, or it is empty; the text names the lines that exist.
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
    """Options that record the device's timeline alone."""
    options: Any = ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    chosen: ProfileOptions = options
    return chosen
