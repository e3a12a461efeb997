"""`.ci/green.py` runs a lane if its files changed since it last ran green, and else does not."""

import json
import runpy
import shutil
import sys

import pytest

from tests.support.paths import ROOT

LANES = ["ptx-rows", "ptx-groups", "ptx-draw"]
GREEN = runpy.run_path(str(ROOT / ".ci/green.py"))


@pytest.fixture
def copy(tmp_path):
    """A folder with the input files of the lanes of PTX, and with .ci/green.py."""
    for lane in LANES:
        inputs = GREEN["_files"](ROOT, GREEN["LANES"][lane])
        for file in [*(path.relative_to(ROOT) for path in inputs), ".ci/green.py"]:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def run(folder, lane, program="print('ran')"):
    return GREEN["main"](folder, ["run", lane, sys.executable, "-c", program])


def change(folder, name):
    with (folder / GREEN["KERNELS"] / f"{name}.py").open("a") as file:
        file.write("\n")


def test_a_changed_file_names_its_lanes(copy, capsys):
    def changed():
        GREEN["main"](copy, ["changed", *LANES])
        return capsys.readouterr().out.split()

    assert changed() == LANES  # none was green yet
    for lane in LANES:
        assert run(copy, lane) == 0
        assert "ran" in capsys.readouterr().out
    assert changed() == []
    assert run(copy, "ptx-draw") == 0
    assert capsys.readouterr().out == "ptx-draw: no file changed since its last green run\n"
    change(copy, "draw")
    assert changed() == ["ptx-draw"]
    run(copy, "ptx-draw")
    capsys.readouterr()
    change(copy, "thread")
    assert changed() == LANES


@pytest.mark.parametrize(
    ("program", "status"), [("raise SystemExit(3)", 3), ("print('NOT RUN: no extra')", 0)]
)
def test_a_lane_that_failed_or_did_not_run_is_not_green(copy, program, status):
    assert run(copy, "ptx-draw", program) == status
    assert not (copy / ".ci/green.json").exists()


def test_a_mark_leaves_files_out(tmp_path):
    for name in ("read", "left"):
        (tmp_path / name).touch()
    assert GREEN["_files"](tmp_path, ["*", "!left"]) == {tmp_path / "read"}


@pytest.fixture
def pair(copy):
    """That folder, with jax 0.12.0 in the environment of the newest."""
    packages = copy / ".venv-newest/lib/python3.13/site-packages"
    (packages / "jax-0.12.0.dist-info").mkdir(parents=True)
    return copy


def turn(folder, capsys, lane="ptx-draw"):
    capsys.readouterr()
    assert GREEN["main"](folder, ["turn", lane]) == 0
    return capsys.readouterr().out.strip()


def test_the_oldest_and_the_newest_jax_take_turns(pair, capsys):
    assert turn(pair, capsys) == "ptx-draw"
    run(pair, "ptx-draw")
    assert turn(pair, capsys) == "ptx-draw-newest"  # of the same files
    run(pair, "ptx-draw-newest", "raise SystemExit(1)")
    assert turn(pair, capsys) == "ptx-draw-newest"
    run(pair, "ptx-draw-newest")
    change(pair, "draw")
    assert turn(pair, capsys) == "ptx-draw"
    run(pair, "ptx-draw")
    change(pair, "draw")
    assert turn(pair, capsys) == "ptx-draw-newest"
    green = json.loads((pair / ".ci/green.json").read_text())
    assert green["ptx-draw: next"] == "ptx-draw-newest"
    assert green["ptx-draw-newest"].endswith(" with jax 0.12.0")


def test_another_newest_jax_changes_its_lanes(pair, capsys):
    for lane in ("ptx-draw", "ptx-draw-newest"):
        run(pair, lane)
    packages = pair / ".venv-newest/lib/python3.13/site-packages"
    (packages / "jax-0.12.0.dist-info").rename(packages / "jax-0.13.0.dist-info")
    assert turn(pair, capsys) == "ptx-draw-newest"
    shutil.rmtree(pair / ".venv-newest")  # where it is not installed, no version is another
    assert run(pair, "ptx-draw-newest") == 0
    assert "no file changed" in capsys.readouterr().out
