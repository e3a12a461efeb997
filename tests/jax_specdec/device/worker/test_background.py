"""Jobs in a thread beside the worker's steps."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from jax_specdec.device.worker import background

pytestmark = pytest.mark.fast

HANGS = """
import threading
from jax_specdec.device.worker.background import BackgroundJobs
begun = threading.Event()
with BackgroundJobs(lambda: None) as jobs:
    jobs.start(lambda: (begun.set(), threading.Event().wait()))
    begun.wait()
    print("said", end="")
    {end}
"""


def test_a_job_runs_in_its_thread_and_gives_way():
    """Also behind one whose error was handed over."""
    ended, seen, nice = threading.Event(), [], []
    jobs, before = background.BackgroundJobs(ended.set), sys.getswitchinterval()

    def job():
        seen.append((threading.current_thread().name, sys.getswitchinterval(), gc.isenabled()))
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    for one, error in ((lambda: 1 // 0, ZeroDivisionError), (job, type(None))):
        jobs.start(one)
        assert jobs.busy
        assert ended.wait(60)
        assert jobs.ended
        assert isinstance(jobs.take(), error)
        assert (jobs.busy, jobs.ended) == (False, False)
        ended.clear()
    assert seen == [(background.NAME, pytest.approx(background.SWITCH_SECONDS, abs=1e-5), False)]
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert nice == [min(19, mine + background.LESS) if sys.platform == "linux" else mine]
    assert (sys.getswitchinterval(), gc.isenabled()) == (pytest.approx(before, abs=1e-5), True)


def test_the_garbage_of_a_job_is_collected_when_nobody_waits():
    class Node:
        pass

    ended, left = threading.Event(), []
    jobs = background.BackgroundJobs(ended.set)

    def job():
        node = Node()
        node.itself = node
        left.append(weakref.ref(node))

    assert not jobs.collect()
    jobs.start(job)
    assert ended.wait(60)
    assert not jobs.collect()  # the job's end was not taken: another may begin
    jobs.take()
    gc.collect()
    assert left[0]() is not None
    assert jobs.collect()
    assert left[0]() is None
    assert not jobs.collect()


class Counting:
    """A job that counts its calls of a function until it is told to end."""

    def __init__(self):
        self.count, self.over, self.ended = 0, False, threading.Event()
        self.jobs = background.BackgroundJobs(self.ended.set)
        self.jobs.start(self)

    def __call__(self):
        while not self.over:
            self.one()

    def one(self):
        self.count += 1

    def counts(self, seconds=0.05):
        """Whether it calls in this time."""
        before = self.count
        time.sleep(seconds)
        return self.count > before

    def stands(self):
        """Whether it stops within a minute."""
        return any(not self.counts() for _ in range(1200))


@pytest.fixture
def job():
    """It runs beside a test, and ends with it."""
    one = Counting()
    yield one
    one.over = True
    assert one.ended.wait(60)


def test_a_job_stops_at_a_call_while_a_step_is_made(job, monkeypatch):
    monkeypatch.setattr(background, "LONGEST_WAIT", 60)
    with job.jobs.giving_way(True):
        assert job.stands()
        with job.jobs.giving_way(False):
            assert job.counts(0.2)
        assert job.stands()
    assert job.counts(0.2)


def test_a_job_that_gives_way_is_not_stopped_for_ever(job):
    with job.jobs.giving_way(True):
        assert job.counts(30 * background.LONGEST_WAIT)
    assert sys.getprofile() is None


@pytest.mark.parametrize(("end", "status", "says"), [("", 0, ""), ("1 // 0", 1, "by zero")])
def test_a_job_that_still_runs_does_not_hold_up_the_end_of_its_process(end, status, says):
    done = subprocess.run(
        [sys.executable, "-c", HANGS.format(end=end)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (status, "said")
    assert says in done.stderr
