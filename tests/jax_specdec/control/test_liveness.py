"""A process that cannot send heartbeats lives as long as it works, by the kernel's counts."""

import itertools
import os
import subprocess

import pytest

from jax_specdec.control.heartbeat import (
    ACTIVITY_SECONDS,
    LEAST_TICKS,
    Activity,
    Liveness,
    QuietTimer,
)
from tests.support.processes import wait_for

LIMIT = 10.0


def stat(ticks=(0, 0), pages=0):
    """A line of /proc/PID/stat, of a program with a name that is hard to read."""
    fields = ["R", *["7"] * 8, str(pages), "7", str(ticks[0]), str(ticks[1]), *["7"] * 30]
    return f"12 (a ) b) {' '.join(fields)}\n"


@pytest.fixture
def counted(tmp_path):
    """An activity, and a function that sets what the kernel counts."""
    (tmp_path / "12").mkdir()
    path = tmp_path / "12" / "stat"
    return Activity(12, tmp_path), lambda **counts: path.write_text(stat(**counts))


def test_work_is_cpu_time_or_pages_between_two_readings(counted):
    activity, count = counted
    count(ticks=(5, 5), pages=3)
    assert not activity.look(100.0)  # there is nothing to compare with
    count(ticks=(5 + LEAST_TICKS - 1, 5), pages=3)
    assert not activity.look(100.0 + ACTIVITY_SECONDS)
    count(ticks=(5 + LEAST_TICKS, 4 + LEAST_TICKS), pages=3)
    assert not activity.look(100.5 + ACTIVITY_SECONDS)  # too soon: it is as it was
    assert activity.look(100.0 + 2 * ACTIVITY_SECONDS)
    assert not activity.look(100.0 + 3 * ACTIVITY_SECONDS)
    count(ticks=(5 + LEAST_TICKS, 4 + LEAST_TICKS), pages=4)
    assert activity.look(100.0 + 4 * ACTIVITY_SECONDS)


@pytest.mark.parametrize("text", [None, "", "12 (a) R 1 2", stat().replace("7", "x")])
def test_a_process_of_which_nothing_is_known_does_not_work(tmp_path, text):
    (tmp_path / "12").mkdir()
    if text is not None:
        (tmp_path / "12" / "stat").write_text(text)
    activity = Activity(12, tmp_path)
    assert not any(activity.look(now) for now in (1.0, 3.0, 5.0))


def test_the_kernel_tells_who_works():
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            asleep, times = Activity(process.pid), itertools.count(1.0, ACTIVITY_SECONDS)
            asleep.look(0.0)
            wait_for(lambda: not asleep.look(next(times)))
        finally:
            process.kill()
    mine, times = Activity(os.getpid()), itertools.count(1.0, ACTIVITY_SECONDS)
    while not mine.look(next(times)):
        sum(range(10**6))  # is work


EVER = {n / 10 for n in range(1000)}


@pytest.mark.parametrize(
    ("beats", "works", "until"),
    [
        (EVER, set(), 100),
        (set(), set(), LIMIT),
        ({20.0}, {1.0}, LIMIT),  # work in the first half is no excuse
        ({5.0}, set(), 5 + LIMIT),
        (set(), EVER, 100),
        (set(), {n for n in EVER if n < 40}, 40 + LIMIT / 2),
        ({7.0, 52.0}, {n for n in EVER if n < 50}, 52 + LIMIT),
    ],
)
def test_a_silent_process_lives_while_it_works(beats, works, until):
    liveness, seconds = Liveness(0), (tenths / 10 for tenths in range(1000))
    liveness.activity = lambda now: now in works
    looks = ((now, liveness.look(now, beat=now in beats, limit=LIMIT)) for now in seconds)
    ended = next((now for now, alive in looks if not alive), 100)
    assert ended == pytest.approx(until, abs=0.3)


def test_time_in_which_nobody_looked_is_no_silence():
    silence = QuietTimer()
    for now in (100.0, 100.5, 4000.0, 4000.2):
        silence.look(now, sign=False)
    assert silence.seconds == pytest.approx(0.5 + QuietTimer.LONGEST_LOOK + 0.2)
