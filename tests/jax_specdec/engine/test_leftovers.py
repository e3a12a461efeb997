"""Directories of engines that were killed: they name their engine, and only dead ones' go."""

from dataclasses import replace

import pytest

from ipc import doctor
from ipc.peers import current_process
from ipc.segment_names import to_text
from jax_specdec.cli import main
from jax_specdec.engine import leftovers
from jax_specdec.engine.work_directory import WorkDirectory


@pytest.fixture
def killed(tmp_path):
    """The directory of an engine that was killed."""
    folder = tmp_path / f"{leftovers.DIRECTORY_PREFIX}killed"
    folder.mkdir()
    dead = replace(current_process(), start_time=1)  # this pid, but an earlier process
    (folder / leftovers.OWNER).write_text(to_text(dead))
    (folder / "worker-0-1.log").write_text("words")
    return folder


@pytest.fixture
def living(tmp_path, monkeypatch):
    """An engine's directory of this process, beside it; rings of other tests are not seen."""
    monkeypatch.setattr(doctor, "find_ring_files", list)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = WorkDirectory()
    yield place.folder
    place.close()


def test_what_a_killed_engine_left_is_found_and_removed(killed, living, tmp_path):
    for of_somebody_else in ("jax-specdec-something", f"{leftovers.DIRECTORY_PREFIX}a"):
        (tmp_path / of_somebody_else).mkdir()
    by_path = {each.path: each for each in leftovers.find_leftovers(tmp_path)}
    assert {path: each.state for path, each in by_path.items()} == {killed: "dead", living: "alive"}
    assert (by_path[killed].outputs, by_path[living].outputs) == (1, 0)
    assert [each.path for each in leftovers.remove(list(by_path.values()))] == [killed]
    assert not killed.exists()
    assert living.exists()


def test_the_command_lists_it_and_removes_it_when_told(killed, living, capsys):
    assert main.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert str(killed) in printed
    assert "2, 0 removed, 1 of dead engines" in printed
    assert main.main(["doctor", "--remove"]) == 0
    assert "2, 1 removed, 0 of dead engines" in capsys.readouterr().out
    assert not killed.exists()
    assert living.exists()


def test_the_command_prints_why_workers_were_lost(killed, living, capsys):
    reason = "2026-11-24T02:26:57+00:00 lost: the model worker was killed"
    (killed / "worker-0-1.log").write_text(f"words\n\n{reason}\n")
    (killed / "worker-0-2.log").write_text("lost: words of a worker\n")
    (killed / "worker-1-1.log").write_bytes(b"\xff" * 100_000)
    # Processes of a worker's may print behind its reason.
    (killed / "worker-1-2.log").write_text(f"words\n\n{reason} too\n" + "a late line\n" * 5000)
    main.main(["doctor"])
    printed = capsys.readouterr().out
    assert f" worker-0-1.log: {reason}\n" in printed
    assert f" worker-1-2.log: {reason} too\n" in printed
    assert printed.count("lost: ") == 2


def test_nothing_is_removed_where_processes_are_hidden(killed, monkeypatch):
    monkeypatch.setattr(doctor, "main", lambda _: 2)
    assert main.main(["doctor", "--remove"]) == 2
    assert killed.exists()


@pytest.mark.parametrize("lost", [True, False])
def test_the_output_of_lost_workers_stays_with_its_owner_s_name(lost, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = WorkDirectory()
    paths = [place.output_file(rank) for rank in (0, 1)]
    for path in paths:
        path.write_text("words")
    (place.folder / "more").mkdir()
    if lost:
        place.keep(paths[0])
    place.close()
    found = [(each.state, each.outputs) for each in leftovers.find_leftovers(tmp_path)]
    assert found == [("alive", 1)] * lost
    if lost:
        assert {path.name for path in paths[0].parent.iterdir()} == {"engine", paths[0].name}
