"""Ctrl-C and SIGKILL, while a worker starts and while tokens come: no process, no ring is left."""

import os
import signal
import subprocess

import pytest

from tests.support.processes import CREATORS, children_of, is_alive, no_ring_is_left, wait_for
from tests.support.scripted_process import start_command


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("strike", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_ends_with_its_engine(strike, begun, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import sys\n" * 500)
    process = start_command(
        "demo", "--prompts", prompts, "--slots", "2", "--no-logprobs", hold=200,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    CREATORS.add(process.pid)
    wait_for(lambda: children_of(process.pid))
    (worker,) = children_of(process.pid)
    while begun and "done" not in process.stdout.readline():
        assert process.poll() is None
    if strike == signal.SIGINT:
        os.killpg(process.pid, strike)
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    if strike == signal.SIGINT:
        assert process.returncode == 130
        assert errors.startswith("interrupted")
        assert "Traceback" not in errors
    wait_for(lambda: not is_alive(worker))
    wait_for(no_ring_is_left)
