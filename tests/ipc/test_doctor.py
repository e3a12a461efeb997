"""The doctor removes what dead creators left, and nothing else."""

import os
import subprocess
import sys
from dataclasses import replace
from unittest import mock

from ipc import RingError, RingReader, RingWriter, doctor
from ipc.peers import current_process
from ipc.segment_names import new_name

LEAVE = """
import os
from ipc import RingReader
rings = [RingReader.create(2, 64), RingReader.create(2, 5000, doorbell=True)]
os._exit(1)
"""


def names_of(pid: int) -> list[str]:
    return [file.path.name for file in doctor.find_ring_files() if file.creator.pid == pid]


def test_leftovers_of_the_dead_are_found_and_removed(capsys, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", LEAVE])
    child.wait(60)
    # Tests in other processes have rings too: the doctor must see and remove only these.
    everything, ours = doctor.find_ring_files, (child.pid, os.getpid())
    monkeypatch.setattr(
        doctor, "find_ring_files", lambda: [f for f in everything() if f.creator.pid in ours]
    )
    with RingReader.create(2, 64, doorbell=True) as living:
        files = doctor.find_ring_files()
        dead = [file for file in files if file.creator.pid == child.pid]
        assert len(dead) == 5 + 6
        kinds = {(file.kind, file.state) for file in dead}
        assert kinds == {(kind, "dead") for kind in ("doorbell", "memory", "semaphore")}
        mine = [file.state for file in files if file.creator == current_process()]
        assert mine == ["alive"] * 6
        assert doctor.main([]) == 1  # reports, removes nothing
        assert "--remove" in capsys.readouterr().out
        doctor.remove_rings_of(doctor.this_process())  # of a living one, and so of nobody
        assert len(names_of(child.pid)) == 11
        removed = doctor.remove_leftovers(doctor.find_ring_files())
        assert {file.path for file in dead} <= {file.path for file in removed}
        assert names_of(child.pid) == []
        with RingWriter.attach(living.name) as writer:  # the living ring is as good as before
            writer.send(b"alive")
            assert living.receive(1).data == b"alive"
    assert doctor.remove_leftovers(files) != []  # an old list: everything is gone, no error
    assert doctor.main(["--remove"]) == 0


def test_other_namespaces_and_recycled_pids(tmp_path):
    me = current_process()
    cases = {
        me: "alive",
        # This pid, but an earlier process.
        replace(me, start_time=me.start_time - 1): "dead",
        # Another container that shares /dev/shm: its pids have no meaning here.
        replace(me, pid_namespace=me.pid_namespace + 1): "other namespace",
        # A process of this pid namespace to which the machine booted at another time.
        replace(me, start_time=1, time_namespace=me.time_namespace + 1): "other namespace",
    }
    for identity, state in cases.items():
        path = tmp_path / new_name(identity)[1:]
        path.write_bytes(b"x")
        (file,) = doctor.find_ring_files(tmp_path)
        assert (file.state, file.kind, file.creator) == (state, "memory", identity)
        assert len(doctor.remove_leftovers([file])) == (state == "dead")
        assert path.exists() == (state != "dead")
        path.unlink(missing_ok=True)


def test_a_doctor_that_cannot_know_removes_nothing(monkeypatch, capsys):
    refuse = mock.Mock(side_effect=RingError("mount /proc"))
    monkeypatch.setattr(doctor, "current_process", refuse)
    assert doctor.main(["--remove"]) == 2
    assert "nothing was removed: mount /proc" in capsys.readouterr().out


def test_strangers_are_not_touched(tmp_path):
    dead = new_name(replace(current_process(), pid=1 << 30))[1:]
    for name in ("sem.other", "psm_1234", dead[:-1], f"sem.{dead}", f"sem.{dead}.else", f"x{dead}"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / dead).symlink_to("/etc/passwd")
    (tmp_path / f"sem.{dead}.free").mkdir()
    (tmp_path / f"{dead}.bell").write_bytes(b"not a FIFO")
    assert doctor.find_ring_files(tmp_path) == []
