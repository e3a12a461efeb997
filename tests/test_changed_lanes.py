"""`.ci/green.py` names the lanes whose files changed since their last green run, and no others."""

import runpy
import shutil

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.fast


def test_a_changed_file_names_its_lanes(tmp_path, capsys):
    green = runpy.run_path(str(ROOT / ".ci/green.py"))
    for file in {file for files in green["LANES"].values() for file in files}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / ".ci").mkdir()

    def changed():
        green["main"](tmp_path, [])
        return capsys.readouterr().out.split()

    every = list(green["LANES"])
    assert changed() == every  # none was green yet
    green["main"](tmp_path, ["--write", *every])
    assert changed() == []
    with (tmp_path / green["KERNELS"] / "draw.py").open("a") as file:
        file.write("\n")
    assert changed() == ["draw"]
    green["main"](tmp_path, ["--write", "draw"])
    with (tmp_path / green["KERNELS"] / "thread.py").open("a") as file:
        file.write("\n")
    assert changed() == every
