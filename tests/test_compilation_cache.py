"""Programs that a run compiled are there for the next one, and never half of one."""

import os
import subprocess
import sys
import zlib

import pytest

from tests.support import compilation_cache
from tests.support.paths import ROOT

pytestmark = pytest.mark.fast

WHOLE = zlib.compress(b"a program" * 100)


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "jax-0.0"


def run_with(kept, **entries):
    """The folder of a run that wrote these entries."""
    run = compilation_cache.lend(kept)
    for name, content in entries.items():
        (run / name).write_bytes(content)
    return run


def test_the_next_run_finds_the_whole_programs_of_the_last(kept):
    compilation_cache.keep(run_with(kept, whole=WHOLE, half=WHOLE[:-5], empty=b""), kept)
    assert [entry.name for entry in kept.iterdir()] == ["whole"]
    run = compilation_cache.lend(kept)
    assert (run / "whole").read_bytes() == WHOLE


def test_two_runs_may_end_at_once(kept):
    run = run_with(kept, both=WHOLE)
    (kept / "both").write_bytes(WHOLE)
    new = {entry.name for entry in run.iterdir()}
    assert new == {"both"}
    compilation_cache.keep(run, kept)
    assert (kept / "both").read_bytes() == WHOLE


def test_folders_of_dead_runs_are_deleted_and_those_of_others_are_not(kept):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    for owner in (ended, os.getppid()):
        kept.with_name(f"{kept.name}-run-{owner}").mkdir(parents=True)
    compilation_cache.lend(kept)
    assert not kept.with_name(f"{kept.name}-run-{ended}").exists()
    assert kept.with_name(f"{kept.name}-run-{os.getppid()}").exists()


def test_too_many_programs_make_room_for_new_ones(kept, monkeypatch):
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", len(WHOLE))
    compilation_cache.keep(run_with(kept, old=WHOLE), kept)
    compilation_cache.keep(run_with(kept, new=WHOLE), kept)
    assert [entry.name for entry in kept.iterdir()] == ["new"]


@pytest.mark.parametrize("given", [True, False])
def test_a_run_uses_the_folder_it_was_given_or_deletes_its_own(kept, given):
    """In a process: what it keeps is kept when it ends."""
    code = (
        "import os, sys; from pathlib import Path; from tests.support import compilation_cache;"
        "compilation_cache.begin(Path(sys.argv[1])); print(os.environ['JAX_COMPILATION_CACHE_DIR'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    if given:
        environment["JAX_COMPILATION_CACHE_DIR"] = "/a/folder"
    done = subprocess.run(
        [sys.executable, "-c", code, str(kept)],
        capture_output=True, text=True, check=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    folder = done.stdout.strip()
    assert (folder == "/a/folder") == given
    assert not os.path.exists(folder)
    assert kept.exists() != given
