"""The command line itself: versions, usage, signals, and imports that come late."""

import ast
import re
import signal
import subprocess
import sys
import threading
import tomllib
from importlib import metadata

import pytest

from jax_specdec.cli.main import COMMANDS, main
from tests.support.paths import ROOT

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("options", [["--drafter", "x"], []])
def test_wrong_usage_is_refused(options, capsys):
    with pytest.raises(SystemExit) as error:
        main(["demo", *options] if options else [])
    assert error.value.code == 2
    assert "usage: jax-specdec" in capsys.readouterr().err


def test_the_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"{project['name']} {project['version']}\n"


def test_a_checkout_that_is_not_installed_says_its_version_and_where_it_is(capsys, monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"jax-specdec {version} (from {ROOT}, not installed)\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: jax-specdec {name}" in text
    assert len(text) > 200
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search(rf"^    {name}\s", capsys.readouterr().out, re.MULTILINE)


def test_two_commands_name_their_drafting_options_alike(capsys):
    named = []
    for command in ("demo", "generate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
        named.append([one for one in options if re.search("adaptive|draft|corpus", one)])
    demos, generates = named
    assert generates == ["--drafter", "--draft-model", "--drafts", "--corpus", "--adaptive-drafts"]
    assert {*demos} == {*generates, "--draft-logprobs"}


def options_of(command, capsys):
    """Every option that the command's help names."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return sorted({*re.findall(r"(?<![\w-])--[a-z][\w-]*", capsys.readouterr().out)})


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_not_abbreviated(name, capsys):
    """`--prompt` would be `--prompts` today, and another option tomorrow."""
    options = options_of(name, capsys)
    assert "--help" in options
    for option in options:
        for short in {option[:end] for end in range(3, len(option))} - {*options}:
            with pytest.raises(SystemExit) as exit_:
                main([name, short])
            assert exit_.value.code == 2
            assert "ambiguous option" not in capsys.readouterr().err


def test_an_option_that_is_not_known_is_answered_with_the_nearest(capsys):
    for given, said in (
        (["demo", "--draft", "3"], "unrecognized arguments: --draft 3; did you mean --drafts?"),
        (["doctor", "--remov"], "unrecognized arguments: --remov; did you mean --remove?"),
        (["doctor", "--zzz"], "unrecognized arguments: --zzz\n"),
        (["view", "f", "--titel=x"], "--titel=x; did you mean --title?"),
        (["generate", "--model", "m", "--promp=a"], "--promp is not known; did you mean --prompt?"),
        (["score", "--prompt", "a"], "--output; --prompt is not known; did you mean --prompts?\n"),
        (["score", "--zzz", "a"], "required: --model, --prompts, --output\n"),
    ):
        with pytest.raises(SystemExit):
            main(given)
        assert said in capsys.readouterr().err


def parsers_that_abbreviate(source):
    """Lines of `source` that make an ArgumentParser which takes abbreviations."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("ArgumentParser")
        and not any(
            one.arg == "allow_abbrev" and ast.unparse(one.value) == "False" for one in node.keywords
        )
    ]


def test_no_program_here_takes_abbreviations():
    files = [
        path
        for top in ("jax_specdec", "ipc", "bench", "examples", "tests")
        for path in (ROOT / top).rglob("*.py")
    ]
    sources = {path: path.read_text(encoding="utf-8") for path in files}
    made = [path for path, text in sources.items() if "ArgumentParser(" in text]
    assert len(made) > 10
    assert {path: found for path in made if (found := parsers_that_abbreviate(sources[path]))} == {}
    assert parsers_that_abbreviate("argparse.ArgumentParser(allow_abbrev=True)") == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_in_order(number, capfd, during):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    found = signal.signal(number, usual)  # the tests may run where it is ignored, as under nohup
    after = []

    def hit():
        signal.raise_signal(number)
        after.append("the signal did nothing")

    during(hit)
    try:
        assert main(["demo"]) == 128 + number
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, found)
    assert capfd.readouterr().err == "interrupted: the worker was stopped\n"
    assert after == []


def test_a_signal_that_is_ignored_stays_ignored(during):
    """`nohup` relies on it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        during(lambda: signal.raise_signal(signal.SIGHUP))
        assert main(["demo"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_main_runs_in_another_thread_too(during):
    during(lambda: None)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main(["demo"])))
    thread.start()
    thread.join()
    assert codes == [0]


INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from jax_specdec.cli.main import main
sys.exit(main(["demo"]))
"""


@pytest.mark.parametrize(
    "module", ["ipc.wire", "numpy", "rich.console", "jax_specdec.engine.engine"]
)
def test_ctrl_c_during_an_import_prints_no_traceback(module):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def tops(*modules):
    """The packages that importing these modules of the command line loads."""
    names = ", ".join(f"jax_specdec.cli.{name}" for name in modules)
    code = f"import sys, {names}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_modules_themselves_import_only_the_standard_library():
    """So Ctrl-C is answered in order from the first moment on."""
    loaded = tops("__main__", "main", *(f"{name.replace('-', '_')}_command" for name in COMMANDS))
    assert "jax_specdec" in loaded
    assert not loaded & {"numpy", "rich", "ipc", "safetensors"}


def test_that_check_can_fail():
    assert tops("token_colors", "prompts") >= {"numpy", "rich", "ipc"}


@pytest.mark.parametrize("module", ["jax_specdec.cli", "jax_specdec.cli.main"])
def test_the_command_line_runs_as_a_module(module, capsys):
    done = subprocess.run([sys.executable, "-m", module, "doctor", "--help"], capture_output=True,
                          text=True, check=True)  # fmt: skip
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert done.stdout == capsys.readouterr().out
    assert done.stdout.startswith("usage: jax-specdec doctor ")
