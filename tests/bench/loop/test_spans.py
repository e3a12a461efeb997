"""A trace is one that Perfetto opens, and no event of it is lost."""

import itertools
import json

import pytest

from bench.loop import spans

pytestmark = pytest.mark.fast


def test_a_trace_is_what_perfetto_opens():
    some = [
        spans.Span(spans.WORKER, "copy", 5_000, 9_500),
        spans.Span(spans.RING, "ring", 9_000, 9_000),
    ]
    device = [spans.DeviceEvent("stream 7", "kernel", 1_000, 3_000)]
    events = json.loads(json.dumps(list(spans.trace_events(some, device, first=1_000))))
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == [*spans.TRACKS, spans.OPERATIONS]
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"}
    for event in complete:
        assert {"name", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["pid"] in named
    assert [(e["name"], e["ts"], e["dur"]) for e in complete] == [
        ("copy", 4.0, 4.5),
        ("ring", 8.0, 0.0),
        ("kernel", 0.0, 2.0),
    ]
    threads = [e for e in events if e["name"] == "thread_name"]
    assert [e["args"]["name"] for e in threads] == ["stream 7"]


def test_no_two_events_of_a_thread_overlap_in_part():
    ring = [(0, 40), (10, 50), (20, 30), (50, 60), (40, 45)]
    some = [spans.Span(spans.RING, "ring", *times) for times in ring]
    events = [e for e in spans.trace_events(some, [], first=0) if e["ph"] == "X"]
    assert len(events) == len(ring)
    assert {e["tid"] for e in events} == {1, 2, 3}
    for thread in (1, 2, 3):
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))
