"""Jobs in a thread beside the worker's steps."""

import gc
import subprocess
import sys
import threading

import pytest

from jax_specdec.device.worker.beside import NAME, SWITCH_SECONDS, Beside

pytestmark = pytest.mark.fast

HANGS = """
import threading
from jax_specdec.device.worker.beside import Beside
begun = threading.Event()
with Beside(lambda: None) as beside:
    beside.start(lambda: (begun.set(), threading.Event().wait()))
    begun.wait()
    print("said", end="")
    {end}
"""


def test_a_job_runs_in_its_thread_and_gives_way():
    ended, seen = threading.Event(), []
    beside, before = Beside(ended.set), sys.getswitchinterval()

    def job():
        seen.append((threading.current_thread().name, sys.getswitchinterval(), gc.isenabled()))

    beside.start(job)
    assert beside.busy
    assert ended.wait(60)
    assert beside.ended
    assert beside.take() is None
    assert (beside.busy, beside.ended) == (False, False)
    assert seen == [(NAME, pytest.approx(SWITCH_SECONDS), False)]
    assert (sys.getswitchinterval(), gc.isenabled()) == (before, True)


def test_the_error_of_a_job_is_handed_over_and_the_next_job_runs():
    ended = threading.Event()
    beside = Beside(ended.set)
    beside.start(lambda: 1 // 0)
    assert ended.wait(60)
    assert isinstance(beside.take(), ZeroDivisionError)
    ended.clear()
    beside.start(lambda: None)
    assert ended.wait(60)
    assert beside.take() is None


@pytest.mark.parametrize(("end", "status", "says"), [("", 0, ""), ("1 // 0", 1, "by zero")])
def test_a_job_that_still_runs_does_not_hold_up_the_end_of_its_process(end, status, says):
    done = subprocess.run(
        [sys.executable, "-c", HANGS.format(end=end)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (status, "said")
    assert says in done.stderr
