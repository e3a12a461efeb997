"""A program with a fleet, in a process of its own: how it ends, and what its terminal shows."""

import os
import signal
import subprocess
import sys

import pytest

from tests.ray.cluster import cluster_that_leaves_nothing, fixture
from tests.support.paths import ROOT
from tests.support.processes import is_alive, wait_for

DRIVER = """
import os, signal, sys
from pathlib import Path
from tests.ray import cluster
from tests.support.processes import wait_for

how, address, note = sys.argv[1:]

def make_engine(config, **options):
    engine = cluster.make_engine(config, **options)
    close = engine.close
    engine.close = lambda: (close(), Path(note).write_text("closed"))
    return engine

def own(number, frame):
    print("own handler", flush=True)
    sys.exit(7)

def run(engine):
    wait_for(lambda: len(cluster.pids(engine)) == 1)
    print(*cluster.pids(engine)[0], flush=True)
    for batch in engine.generate(cluster.make_requests(20_000, 400)):
        if how == "exit":
            os._exit(3)
        if how == "lost" and engine.status[0].losses:
            return

if how == "own":
    signal.signal(signal.SIGTERM, own)
made = cluster.RayEngine(
    cluster.config(), cluster.RayConfig(address=address), make_engine=make_engine
)
if how == "no with":
    run(made)
else:
    with made:
        run(made)
"""


cluster = fixture(cluster_that_leaves_nothing, 1)


def driver(cluster, how, note):
    """Start a program, and wait until its replica takes requests; the replica's processes too."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment.pop("RAY_ADDRESS", None)
    program = subprocess.Popen(
        [sys.executable, "-c", DRIVER, how, cluster.address, str(note)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    return program, [int(pid) for pid in program.stdout.readline().split()]


@pytest.mark.parametrize(
    ("how", "status"), [("with", signal.SIGTERM), ("no with", signal.SIGTERM), ("own", 7)]
)
def test_sigterm_closes_the_fleet_of_a_program(cluster, tmp_path, how, status):
    """Its engines are closed, and not only killed; a handler of the program's own is kept."""
    program, found = driver(cluster, how, tmp_path / "note")
    assert len(found) == 2
    program.send_signal(signal.SIGTERM)
    output, errors = program.communicate(timeout=60)
    assert program.returncode == status, errors
    assert (tmp_path / "note").read_text() == "closed"
    assert ("own handler" in output) == (how == "own")
    wait_for(lambda: not any(map(is_alive, found)), 20)
    assert errors == ""


def test_the_terminal_shows_a_loss_and_no_lines_of_rays(cluster, tmp_path):
    program, found = driver(cluster, "lost", tmp_path / "note")
    os.kill(found[0], signal.SIGKILL)
    output, errors = program.communicate(timeout=90)
    assert (program.returncode, output) == (0, "")
    (line,) = errors.splitlines()
    assert line.startswith("replica 0 is lost: ")
