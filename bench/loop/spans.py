"""Spans of time, and their trace in the Trace Event Format, which Perfetto opens.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WORKER, DEVICE, RING, ENGINE = "worker thread", "device", "ring", "engine process"
TRACKS = (WORKER, DEVICE, RING, ENGINE)  # from top to bottom
OPERATIONS = "device operations"  # the tracks of jax.profiler


@dataclass(frozen=True)
class Span:
    """One part of a step; begin and end in ns of CLOCK_MONOTONIC."""

    track: str  # one of TRACKS
    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class DeviceEvent:
    """One operation of the device; begin and end in ns of CLOCK_MONOTONIC."""

    line: str  # a stream of the device, or a thread
    name: str
    begin: int
    end: int


def trace_events(
    spans: Sequence[Span], operations: Sequence[DeviceEvent], first: int
) -> Iterator[dict[str, Any]]:
    """Complete events ("X"), with a process for each track; times in us since `first`."""
    for pid, track in enumerate((*TRACKS, OPERATIONS), start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": track}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0,
               "args": {"sort_index": pid}}  # fmt: skip
    for track in TRACKS:
        own = sorted((s for s in spans if s.track == track), key=lambda s: s.begin)
        for tid, span in zip(lanes(own), own, strict=True):
            yield _complete(span.name, 1 + TRACKS.index(track), tid, span.begin - first, span)
    pid = 1 + len(TRACKS)
    threads = {line: tid for tid, line in enumerate(sorted({one.line for one in operations}), 1)}
    for line, tid in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": line}}
    for one in operations:
        yield _complete(one.name, pid, threads[one.line], one.begin - first, one)


def lanes(spans: Sequence[Span]) -> list[int]:
    """The thread of each span: the first whose last span has ended.

    Perfetto nests the events of a thread. Of two that overlap in part, as two messages in the ring
    do, it would drop one.
    """
    ends: list[int] = []
    found = []
    for span in spans:
        free = [lane for lane, end in enumerate(ends) if end <= span.begin]
        lane = free[0] if free else len(ends)
        ends[lane : lane + 1] = [span.end]
        found.append(1 + lane)
    return found


def _complete(
    name: str, pid: int, tid: int, since: int, span: Span | DeviceEvent
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": since / 1e3,
        "dur": (span.end - span.begin) / 1e3,
    }
