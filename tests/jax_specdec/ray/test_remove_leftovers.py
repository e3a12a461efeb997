"""What killed replicas left on a host is removed; what anybody lives for is not."""

import os
import subprocess
import threading
from dataclasses import replace
from unittest import mock

import pytest

from ipc import RingError, doctor
from ipc.peers import current_process, process_start_time
from ipc.segment_names import new_name, to_text
from jax_specdec.engine import leftovers
from jax_specdec.ray.remove_leftovers import remove_host_leftovers


@pytest.fixture
def places(tmp_path):
    """Where rings and engines' directories are."""
    made = {"rings": tmp_path / "shm", "folders": tmp_path / "tmp"}
    for path in made.values():
        path.mkdir()
    return made


def ring_of(process, rings):
    """All names that a ring of a process has; the file of its memory."""
    name = new_name(process)[1:]
    for each in (name, *(f"sem.{name}.{part}" for part in ("freed", "items", "seat", "joined"))):
        (rings / each).write_bytes(b"x")
    os.mkfifo(rings / f"{name}.bell")
    return rings / name


def folder_of(process, folders, name, *files):
    made = folders / f"{leftovers.DIRECTORY_PREFIX}{name}"
    made.mkdir()
    for file in files:
        (made / file).write_text("x")
    (made / leftovers.OWNER).write_text(process)
    return made


def test_only_what_dead_processes_of_this_host_made_is_removed(places):
    me, (rings, folders) = current_process(), places.values()
    gone = replace(me, start_time=me.start_time + 1)  # its pid is this one's by now
    living, unknown = ring_of(me, rings), ring_of(replace(me, pid_namespace=1), rings)
    ring_of(gone, rings)
    (foreign := rings / "psm_abc").write_bytes(b"x")
    weights = folder_of(to_text(gone), folders, "weights-a", "weights")
    used = folder_of(to_text(me), folders, "weights-b", "weights")
    explains = folder_of(to_text(gone), folders, "c", "rank-0.log")
    assert len(list(rings.iterdir())) == 3 * 6 + 1
    remove_host_leftovers(**places)
    left = {path.name.removeprefix("sem.").partition(".bell")[0] for path in rings.iterdir()}
    assert len(list(rings.iterdir())) == 2 * 6 + 1
    assert {living.name, unknown.name, foreign.name} <= left
    assert (weights.exists(), used.exists(), explains.exists()) == (False, True, True)


def test_a_process_that_is_about_to_end_is_waited_for(places):
    """A replica is tidied up after as soon as Ray was told to end it."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        start = process_start_time(child.pid)
        process = replace(current_process(), pid=child.pid, start_time=start)
        ring = ring_of(process, places["rings"])
        remove_host_leftovers(**places)
        assert ring.exists()
        tidying = threading.Thread(
            target=remove_host_leftovers, args=(to_text(process),), kwargs=places
        )
        tidying.start()
        child.kill()
        tidying.join(30)
        assert list(places["rings"].iterdir()) == []
    finally:
        child.kill()
        child.wait()


def test_where_nobody_knows_who_lives_nothing_is_removed(places, monkeypatch, caplog):
    unknown = mock.Mock(side_effect=RingError("mount the /proc of this pid namespace"))
    ring = ring_of(replace(current_process(), start_time=1), places["rings"])
    monkeypatch.setattr(doctor, "current_process", unknown)
    remove_host_leftovers(**places)
    assert ring.exists()
    assert "mount the /proc" in caplog.text
