"""Ctrl-C and SIGKILL, while workers start and while tokens come: no process and no ring is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import quick_compile
from tests.support.processes import CREATORS, children_of, is_alive, no_ring_is_left, wait_for

# As little as a worker can compile: when processes end does not depend on what they compute.
SMALL = ("--drafter", "none", "--drafts", "1", "--slots", "2", "--no-logprobs")


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    yield
    wait_for(no_ring_is_left)


def demo(*options, **kwargs):
    command = [sys.executable, "-u", "-m", "jax_specdec.cli.main", "demo", *SMALL, *options]
    environment = os.environ | {"XLA_FLAGS": quick_compile.FLAGS}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, **pipes, **kwargs)
    CREATORS.add(process.pid)
    return process


def worker_of(pid):
    """The worker that a demo has started."""
    for _ in range(1200):
        if children := children_of(pid):
            return children[0]
        time.sleep(0.05)
    raise AssertionError("the demo started no worker")


@pytest.fixture
def many_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("import sys\n" * 500)
    return str(path)


def interrupted(process):
    """Press Ctrl-C and see both processes end; returns what was printed to stderr."""
    worker = worker_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    wait_for(lambda: not is_alive(worker))
    return errors


def test_ctrl_c_while_the_worker_starts(many_prompts):
    process = demo("--prompts", many_prompts, start_new_session=True)
    worker_of(process.pid)
    time.sleep(0.5)
    assert interrupted(process).startswith("interrupted")


def test_ctrl_c_while_tokens_come(many_prompts):
    process = demo("--prompts", many_prompts, start_new_session=True)
    while "done" not in process.stdout.readline():
        assert process.poll() is None
    errors = interrupted(process)
    assert errors.startswith("interrupted")
    assert "Traceback" not in errors


def test_a_worker_does_not_outlive_a_killed_engine(many_prompts):
    process = demo("--prompts", many_prompts)
    worker = worker_of(process.pid)
    while "done" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    wait_for(lambda: not is_alive(worker))


def test_a_worker_that_starts_after_its_engine_died_cleans_up(many_prompts):
    process = demo("--prompts", many_prompts)
    worker = worker_of(process.pid)
    time.sleep(0.3)  # it imports jax: it has not attached
    process.kill()
    process.communicate()
    wait_for(lambda: not is_alive(worker))  # then the fixture looks at what is left
