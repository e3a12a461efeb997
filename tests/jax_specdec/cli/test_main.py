"""The command line itself: versions, usage, signals, and imports that come late."""

import re
import shlex
import signal
import tomllib
from importlib import metadata
from unittest import mock

import pytest

import jax_specdec.cli.main as main_module
from jax_specdec.cli.main import COMMANDS, main
from tests.support.command_status import status_of
from tests.support.paths import ROOT
from tests.support.processes import ended, in_thread, output_of


def test_the_version_is_that_of_the_project_or_of_the_checkout(capsys, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = f"{project['name']} {project['version']}"
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"{said}\n"
    monkeypatch.setattr(metadata, "version", mock.Mock(side_effect=metadata.PackageNotFoundError))
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"{said} (from {ROOT}, not installed)\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    assert status_of(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"usage: jax-specdec {name}" in text
    assert len(text) > 200
    assert max(map(len, text.splitlines())) <= 80
    example = text.splitlines()[0].removeprefix("example: ")
    program, *arguments = shlex.split(example)
    assert program == "jax-specdec"
    assert main_module.parsed_options(arguments)[1].command == name  # which it would refuse else
    status_of("--help")
    assert re.search(
        rf"\Aexample: .*^    {name}\s", capsys.readouterr().out, re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGINT, signal.default_int_handler),
        *((number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)),
        (signal.SIGHUP, signal.SIG_IGN),
    ],
)
def test_a_signal_ends_the_work_in_order(number, handler, capfd, during):
    """One that is ignored stays ignored: `nohup` relies on it."""
    before = signal.signal(number, handler)  # the tests may run where it is ignored
    during(lambda: signal.raise_signal(number))
    ends = handler is not signal.SIG_IGN
    try:
        assert main(["demo"]) == (128 + number if ends else 0)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert capfd.readouterr().err == ("interrupted: the worker was stopped\n" if ends else "")


def test_main_runs_in_another_thread_too(fake):
    codes = []
    in_thread(lambda: codes.append(main(["demo"])))
    assert codes == [0]


ENGINE = "jax_specdec.engine.engine"
NO_X = "ModuleNotFoundError('no x')"
FAILING_IMPORT = """
import sys
class Failure:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise eval(sys.argv[2])
sys.meta_path.insert(0, Failure())
from jax_specdec.cli.main import main
sys.exit(main([sys.argv[3]]))
"""


@pytest.mark.parametrize(
    ("module", "error", "command", "status", "message"),
    [
        *((name, "KeyboardInterrupt", "demo", 130, "interrupted") for name in ("ipc.wire", ENGINE)),
        ("xxhash", NO_X, "doctor", 2, "jax-specdec: no x: doctor needs `pip install .`"),
        ("pydantic", NO_X, "serve", 2, "jax-specdec: no x: serve needs `pip install '.[serve]'`"),
    ],
)
def test_an_import_that_fails_prints_no_traceback(module, error, command, status, message):
    """By Ctrl-C, or as a package is not installed."""
    done = ended("-c", FAILING_IMPORT, module, error, command)
    assert (done.returncode, done.stderr) == (status, f"{message}\n")


def tops(*modules):
    """The packages that importing these modules of the command line loads."""
    names = ", ".join(f"jax_specdec.cli.{name}" for name in modules)
    code = f"import sys, {names}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    return set(output_of(code).split())


def test_the_command_line_imports_the_standard_library_alone():
    """So Ctrl-C is answered in order from the first moment on: commands are imported behind it."""
    loaded = tops("__main__", "main")
    assert "jax_specdec" in loaded
    assert not loaded & {"numpy", "rich", "ipc", "safetensors"}
    assert tops("standard_output", "prompts") >= {"numpy", "rich", "ipc"}  # the check can fail


@pytest.mark.parametrize("module", ["jax_specdec.cli", "jax_specdec.cli.main"])
def test_the_command_line_runs_as_a_module(module):
    done = ended("-m", module, "doctor", "--help", check=True)
    assert "\n\nusage: jax-specdec doctor " in done.stdout
