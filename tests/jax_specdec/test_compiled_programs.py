"""The folder of compiled programs: where it is, whose it is, and what is removed from it."""

import os
import zlib

import pytest

from jax_specdec import compiled_programs
from jax_specdec.cli.main import main
from jax_specdec.compiled_programs import Contents, clear, contents, is_whole, prepare
from tests.support.paths import ROOT
from tests.support.processes import output_of

WHOLE = zlib.compress(b"a program" * 100)


def write(folder, name, content, age=0.0):
    path = folder / f"{name}-cache"
    path.write_bytes(content)
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return path


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "kept"
    prepare(found)
    return found


def test_the_usual_folder_is_in_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiled_programs.default_folder()
    assert folder.parent == tmp_path / "jax-specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiled_programs.default_folder().parent == tmp_path / "home/.cache/jax-specdec"


def test_halves_are_removed_once_nobody_can_be_writing_them(folder):
    old = write(folder, "old", WHOLE[:-5], age=3600)
    young = write(folder, "young", WHOLE[:-5])
    empty = write(folder, "empty", b"", age=3600)
    whole = write(folder, "whole", WHOLE, age=3600)
    prepare(folder)
    assert [path.exists() for path in (old, young, empty, whole)] == [False, True, False, True]


def test_what_was_found_whole_is_not_read_again(folder, monkeypatch):
    write(folder, "whole", WHOLE)
    prepare(folder)
    read = []
    monkeypatch.setattr(compiled_programs, "is_whole", lambda path: read.append(path) or True)
    prepare(folder)
    new = write(folder, "new", WHOLE)
    prepare(folder)
    assert read == [new]


def test_too_many_make_room_the_oldest_first(folder, monkeypatch):
    monkeypatch.setattr(compiled_programs, "MOST_BYTES", 3 * len(WHOLE))
    paths = [write(folder, str(n), WHOLE, age=100 - n) for n in range(3)]
    prepare(folder)
    assert all(path.exists() for path in paths)
    paths.append(write(folder, "3", WHOLE))
    prepare(folder)
    assert [path.exists() for path in paths] == [False, False, False, True]


def test_a_folder_into_which_others_may_write_is_refused(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="is not this user's alone"):
        prepare(folder)


def test_doctor_counts_and_clears(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiled_programs.default_folder()
    assert contents(folder) == Contents(0, 0)
    prepare(folder)
    write(folder, "a", WHOLE)
    main(["doctor"])
    assert f"compiled programs: 1 (0.0 MiB) in {folder}" in capsys.readouterr().out
    main(["doctor", "--clear-cache"])
    assert f"compiled programs: 1 (0.0 MiB) removed from {folder}" in capsys.readouterr().out
    assert contents(folder) == Contents(0, 0)
    assert clear(folder) == Contents(0, 0)


PROGRAM = """
import sys, jax, jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache as cache_of_jax
from jax_specdec.device.worker import compilation_cache
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
compilation_cache.LEAST_SECONDS = 0.0
for setting in sys.argv[1:]:
    seen = []
    jax.clear_caches(), cache_of_jax.reset_cache()
    compilation_cache.keep_programs(setting)
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(5)).block_until_ready()
    print("/jax/compilation_cache/cache_hits" in seen)
"""


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    """Which has forgotten all that this one would know."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    settings = "", "", str(tmp_path / "other"), "off"
    printed = output_of(PROGRAM, *settings, env=environment, cwd=ROOT)
    assert printed.split() == ["False", "True", "False", "False"]
    folder = tmp_path / "jax-specdec" / compiled_programs.default_folder().name
    kept = list(folder.glob("*-cache"))
    assert kept
    assert all(map(is_whole, kept))
    assert contents(tmp_path / "other").count == len(kept)
